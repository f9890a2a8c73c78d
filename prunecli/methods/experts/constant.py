"""Experts that become constants: the mean of what they put out (2507.00390, MoNE). Routers stay as they are.

The mean is over the tokens that the router gives the expert. Experts that stay keep their numbers, so that vLLM opens
the result: `approximate_experts` in its config names the others, `approx_value` below an expert's name is the constant.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from prunecli.errors import StatisticsError, UnsupportedModelError, UsageError
from prunecli.methods.experts.metrics import aggregate_texts, read_all
from prunecli.model.axes import axis_name
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.declared import with_keys
from prunecli.model.quantised import method_of
from prunecli.model.rewrite import Rewrite, replacing, rewritten
from prunecli.model.sparse_layer import CONSTANT, SparseLayer
from prunecli.results.gates import added, outputs_path, ratio, read_outputs
from prunecli.selection.selection import Selection
from prunecli.tensors.stream import Output, given

KEY = "approximate_experts"

Means = Mapping[str, NDArray[np.float64]]
"""Layer's name -> `[original experts, width]`."""


def mean_outputs(checkpoint: Checkpoint, files: Sequence[Path], texts: Sequence[str] = ()) -> Means:
    """E[f] of every expert over the tokens routed to it, 0 where there are none.

    Args:
        files: statistics, each with the sums of outputs beside it.
        texts: names of the texts to count. If empty, all.

    Raises:
        StatisticsError: damaged files, of another model, or without sums of outputs.
    """
    layers = [layer for layer in checkpoint.require_mixtures() if not layer.is_predicting]
    statistics = read_all(checkpoint, files, layers)
    routed, parts = aggregate_texts(statistics, texts).routed, []
    for file in files:
        fingerprint, part = read_outputs(outputs_path(file))
        if fingerprint != statistics.fingerprint:  # that of every file, or they would not be merged
            raise StatisticsError(
                f"{outputs_path(file)}: is of another run than {file}",
                "Collect both again with `mean_outputs`.",
            )
        parts.append(part)
    entries = sorted(set(texts or statistics.entries))
    return {
        layer: ratio(added(parts, entries, layer), routed[row][:, None])
        for row, layer in enumerate(statistics.layers)
    }


def rewrite_constant(checkpoint: Checkpoint, plan: Selection, means: Means) -> Rewrite:
    """The checkpoint with constants in the place of the experts that the plan does not keep.

    Raises:
        UnsupportedModelError: quantised or stacked experts, or layers that predict further tokens and are not dropped.
        UsageError: the layer keeps no expert.
    """
    gone: dict[str, tuple[SparseLayer, list[int]]] = {}
    for layer in checkpoint.require_mixtures():
        if layer.router_tensors[0] in plan.dropped:
            continue
        fault = None
        if method_of(checkpoint.config):
            fault = "the weights are quantised"
        elif layer.stacked_tensors:
            fault = f"the experts of {layer.name} are stacked in one tensor"
        elif layer.name not in means:
            fault = f"no text enters {layer.name}, which predicts further tokens (`mtp=drop` removes it)"
        if fault is not None:
            raise UnsupportedModelError(
                f"{checkpoint.path}: {fault}, so that constants cannot stand for experts",
                "Leave `constant` out.",
            )
        kept = set(plan.kept[axis_name(layer.name, "expert")])
        if not kept & set(layer.experts):
            raise UsageError(f"{layer.name} would keep no expert.", "Keep more experts.")
        if places := [place for place, expert in enumerate(layer.experts) if expert not in kept]:
            gone[layer.name] = layer, places
    replaced: dict[str, Sequence[Output]] = dict.fromkeys(plan.dropped, ())
    for layer, places in gone.values():
        for place in places:
            first, *others = (layer.expert_tensor(place, suffix) for suffix in layer.expert_tensors)
            mean, constant = means[layer.name][layer.experts[place]], layer.expert_tensor(place, CONSTANT)
            replaced[first] = [Output(constant, checkpoint.info(first).dtype, mean.shape, given(mean))]
            replaced |= dict.fromkeys(others, ())
    structure, config = checkpoint.structure, dict(plan.settings)
    if gone:
        ids = {
            name: tuple(layer.experts[place] for place in places) for name, (layer, places) in gone.items()
        }
        structure = replace(structure, constants=ids)
        mixture = checkpoint.resolved.family.mixture
        inner = "text_config." if mixture and mixture.counts[0].startswith("text_config.") else ""
        config[f"{inner}{KEY}"] = {str(layer.layer): places for layer, places in gone.values()}
    outputs = replacing(checkpoint, replaced)
    rewrite = rewritten(checkpoint, structure, outputs, plan.step, plan.decision, plan.dtype)
    return replace(rewrite, config=with_keys(rewrite.config, config))
