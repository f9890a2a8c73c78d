"""What each tensor of the pruned checkpoint is made of: pure, nothing is read but names and shapes.

Experts are pruned by dropping their weights and their rows of the router (2212.09811).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from prunecli.errors import UsageError
from prunecli.methods.experts.plan import ExpertPlan
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.declared import with_keys
from prunecli.model.mixtures import predicting_tensors
from prunecli.model.quantisation import numbered_refusal, renamed_settings
from prunecli.model.rewrite import Rewrite, rewritten
from prunecli.model.sparse_layer import SparseLayer
from prunecli.tensors.dtypes import parse_dtype
from prunecli.tensors.stream import Copy, Expression, Output, Rows, Slices, joined

NUMBERED = re.compile(r"experts?\\?[._](?:expert_)?\d+")
"""The number of an expert in the settings of a quantisation."""


def rewrite_experts(checkpoint: Checkpoint, plan: ExpertPlan) -> Rewrite:
    """The checkpoint with only the experts that the plan keeps, its tensors in the order of the source.

    Kept experts become `expert_0 … expert_{n-1}` in the given order; what holds an entry for each expert, as the
    router does, keeps those of their places in the file. What hangs below an expert's name goes with it, whatever it
    is, so that quantised experts stay as they are. A layer that keeps all of its experts in their order is copied.

    Raises:
        UsageError: an id that the layer does not hold, fewer than the router picks, or groups of different sizes; a
            cast of quantised weights.
        UnsupportedModelError: different numbers in layers of a family that only its stock class runs.
    """
    target = None if plan.dtype is None else parse_dtype(plan.dtype)
    layers = {layer.name: layer for layer in checkpoint.require_mixtures()}
    changed = {}
    for name, ids in plan.kept.items():
        if not (plan.mtp == "drop" and name in layers and layers[name].is_predicting):
            _check(layers, name, ids, plan.active)
        if tuple(ids) != layers[name].experts:
            changed[name] = tuple(ids)
    moves = _moves([layers[name] for name in layers if name in changed], changed)
    if plan.mtp == "drop":
        moves.dropped.update(predicting_tensors(checkpoint, checkpoint.resolved.sizes))
    outputs = []
    for name, info in checkpoint.tensors.items():
        if name in moves.dropped:
            continue
        expression: Expression = Copy(name)
        shape = info.shape
        if name in moves.cut:
            axis, places = moves.cut[name]
            shape = (*shape[:axis], len(places), *shape[axis + 1 :])
            ranges = joined((place, place + 1) for place in places)
            expression = Slices(name, axis, tuple(ranges)) if axis else Rows(name, places)
        outputs.append(Output(moves.renamed.get(name, name), info.cast(target).dtype, shape, expression))
    structure = checkpoint.structure
    if changed:
        originals = {name: layers[name].original_experts for name in changed}
        structure = structure.keeping_experts(changed, originals)
    rewrite = rewritten(checkpoint, structure, tuple(outputs), plan.step, plan.decision)
    config = with_keys(rewrite.config, changed_settings(checkpoint, plan))
    moved = [layers[name] for name in changed]
    return replace(rewrite, config=renumbered(checkpoint.path, config, moved, moves.places))


def changed_settings(checkpoint: Checkpoint, plan: ExpertPlan) -> dict[str, int]:
    """The keys of config.json that `--active` and `--mtp drop` change, with their new values."""
    sizes, mixture = checkpoint.resolved.sizes, checkpoint.resolved.family.mixture
    assert mixture is not None
    settings = {key: 0 for key in mixture.predicted if plan.mtp == "drop" and sizes.states(key)}
    if plan.active is not None and not isinstance(mixture.top_k, int):
        keys = [key for key in mixture.top_k if sizes.states(key)] or mixture.top_k[:1]
        settings |= dict.fromkeys(keys, plan.active)
    return settings


def _check(layers: Mapping[str, SparseLayer], name: str, ids: Sequence[int], active: int | None) -> None:
    if name not in layers:
        raise UsageError(f"{name} is not a sparse layer of this model.", f"It has {', '.join(layers)}.")
    layer = layers[name]
    stray = sorted(set(ids) - set(layer.experts))
    if stray or len(set(ids)) != len(ids):
        what = f"has no expert {stray[0]}" if stray else "cannot keep an expert twice"
        raise UsageError(f"{name} {what}.", "Ids are those of the original model.")
    layer = layer if active is None else replace(layer, top_k=active)
    if len(ids) < layer.top_k:
        raise UsageError(
            f"{name} would keep {len(ids)} experts; the router picks {layer.top_k} for each token.",
            "Keep more experts.",
        )
    # The router takes as many experts for each of its groups, one group after another.
    groups, width = layer.groups, layer.num_experts // layer.groups.count
    place = {expert: index for index, expert in enumerate(layer.experts)}
    of_groups = [place[expert] // width for expert in ids]
    sizes = [of_groups.count(number) for number in range(groups.count)]
    if len(set(sizes)) > 1 or of_groups != sorted(of_groups):
        raise UsageError(
            f"{layer.name} would keep {', '.join(map(str, sizes))} experts of its {groups.count} groups; the router "
            "takes as many for each, one group after another.",
            f"Keep as many of each {width} experts, in their order.",
        )
    if sizes[0] < groups.least or sizes[0] * groups.chosen < layer.top_k:
        raise UsageError(
            f"{layer.name} would keep {sizes[0]} experts of each group; the router picks {layer.top_k} from "
            f"{groups.chosen} groups, of which each has at least {groups.least}.",
            "Keep more experts.",
        )


@dataclass(frozen=True)
class _Moves:
    """What becomes of the tensors of changed layers.

    Attributes:
        places: layer's name -> places in the file of the experts that stay, in their new order.
        renamed: an expert's tensor -> its new name.
        dropped: tensors that go.
        cut: tensor of all experts -> axis, and the places that stay.
    """

    places: dict[str, tuple[int, ...]] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)
    dropped: set[str] = field(default_factory=set)
    cut: dict[str, tuple[int, tuple[int, ...]]] = field(default_factory=dict)


def _moves(layers: Iterable[SparseLayer], kept: Mapping[str, tuple[int, ...]]) -> _Moves:
    moves = _Moves()
    for layer in layers:
        place_of = {expert: index for index, expert in enumerate(layer.experts)}
        places = tuple(place_of[expert] for expert in kept[layer.name])
        moves.places[layer.name] = places
        moves.cut.update({name: (axis, places) for name, axis in layer.cut.items()})
        owners = [f"{layer.expert_prefix.format(expert=number)}." for number in range(layer.num_experts)]
        gone = set(range(layer.num_experts)) - set(places)
        for suffix in layer.expert_tensors:
            moves.dropped.update([owners[index] + suffix for index in gone])
            moves.renamed.update(
                {owners[old] + suffix: owners[new] + suffix for new, old in enumerate(places)}
            )
    return moves


def renumbered(
    path: Path, config: Mapping[str, Any], layers: Sequence[SparseLayer], places: Mapping[str, Sequence[int]]
) -> dict[str, Any]:
    """config.json with every expert's name as it is after pruning; those of dropped experts are left out.

    Args:
        path: of the checkpoint, for messages.
        config: names of modules are keys or texts in its settings, as in `ignore` of compressed-tensors.
        layers: that lose experts, or change their order.
        places: layer's name -> places of the experts that stay, in their new order.

    Raises:
        UnsupportedModelError: a name with an expert's number that fits no layer: a pattern, of many layers perhaps.
    """
    new_numbers = []
    for layer in layers:
        if layer.expert_prefix:
            # An expert's name; the settings may leave out the `model.` before it.
            escaped = re.escape(layer.expert_prefix.removeprefix("model.")).replace(r"\{expert\}", r"(\d+)")
            pattern = re.compile(rf"(?:^|(?<=model\.)){escaped}(?=$|\.)")
            new_numbers.append((pattern, {old: new for new, old in enumerate(places[layer.name])}))

    def rename(text: str) -> str | None:
        if not NUMBERED.search(text):
            return text
        for pattern, numbers in new_numbers:
            if match := pattern.search(text):
                new = numbers.get(int(match[1]))
                return None if new is None else f"{text[: match.start(1)]}{new}{text[match.end(1) :]}"
        if any(f"{name.removeprefix('model.')}." in text for name in places) or text.startswith("re:"):
            raise numbered_refusal(path, "experts", text)
        return text

    return renamed_settings(config, rename) if new_numbers else dict(config)
