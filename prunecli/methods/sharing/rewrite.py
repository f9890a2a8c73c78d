"""What each tensor of the checkpoint with shared FFNs or attentions is made of.

Pure: nothing is read but names and shapes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from prunecli.methods.sharing.arrange import SharePlan, own_tensors
from prunecli.methods.sharing.hidden_units import ffn_tensor, weighted_sum
from prunecli.model.attention import AttentionLayer
from prunecli.model.axes import axis_name
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.rewrite import Rewrite, rewritten
from prunecli.model.structure import KeptUnits, Structure
from prunecli.tensors.dtypes import parse_dtype
from prunecli.tensors.stream import Copy, Output, shape_of


def rewrite_shared(checkpoint: Checkpoint, plan: SharePlan) -> Rewrite:
    """The checkpoint with its FFNs or attentions as planned, its tensors in the order of the source.

    What stays as it is, is copied. What is removed goes with its norms and, where no layer is left that uses it, an
    attention's table of positions; each layer that shares keeps its own norms.

    Raises:
        CheckpointError: tensors that config.json does not ask for, or lack of some.
        UnsupportedModelError: the family is not declared.
    """
    checkpoint.check()
    target = None if plan.dtype is None else parse_dtype(plan.dtype)
    layers: Mapping[str, Any] = plan.layers
    own = {name: own_tensors(layer) for name, layer in layers.items()}
    made: dict[str, list[Output]] = defaultdict(list)
    for group in plan.groups:
        for name, *sources in zip(own[group.owner], *(own[name] for name in group.sources), strict=True):
            if plan.part == "FFN":
                suffix = name.removeprefix(f"{group.owner}.")
                units, seed = plan.units.get(group.owner), f"{plan.seed}:{name}"
                expression = ffn_tensor(checkpoint, layers, group, suffix, units, seed)
            elif sources[0] in checkpoint.tensors:
                expression = weighted_sum([Copy(source) for source in sources], 1 / len(sources))
            else:  # config.json does not ask for this tensor, or no head is left
                continue
            dtype = checkpoint.info(sources[0]).cast(target).dtype
            made[sources[0]].append(Output(name, dtype, shape_of(checkpoint, expression, name), expression))
    gone = {name for names in own.values() for name in names}
    for layer in (layers[name] for name in plan.removed):
        gone.update(layer.norm_tensors)
        if isinstance(layer, AttentionLayer):
            prefix = layer.name.removesuffix(layer.spec.name)
            gone |= {f"{prefix}{spec.name}" for spec in layer.spec.tensors if spec.first}
    outputs: list[Output] = []
    for name, info in checkpoint.tensors.items():
        if name in gone:
            outputs += made.get(name, ())
        else:
            outputs.append(Output(name, info.cast(target).dtype, info.shape, Copy(name)))
    return rewritten(
        checkpoint, _structure(checkpoint, plan, layers), tuple(outputs), plan.step, plan.decision
    )


def _structure(checkpoint: Checkpoint, plan: SharePlan, layers: Mapping[str, Any]) -> Structure:
    """The source's structure with what the plan shares, removes and resizes."""
    structure, sizes = checkpoint.structure, checkpoint.layout.sizes
    shared = {name: group.owner for group in plan.groups for name in group.members[1:]}
    widths, axes = {}, dict(structure.axes)
    for name in layers:  # heads of a shared attention are its owner's
        axes.pop(axis_name(name, "head"), None)
    for group in plan.groups:
        layer = layers[group.owner]
        if plan.part == "FFN":
            if group.width != sizes.count(layer.stack.ffn.width):
                widths[group.owner] = group.width
            continue
        axis, held = axis_name(group.owner, "head"), layers[group.sources[0]].heads
        if axis in structure.axes or held != tuple(range(layer.stated_heads)):
            axes[axis] = KeptUnits(held, layer.original_heads)
    return replace(structure.changing(layers, shared, plan.removed, widths), axes=axes)
