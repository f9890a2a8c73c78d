"""What each tensor of the checkpoint with shared FFNs is made of: pure, nothing is read but names and shapes.

An FFN is FFN(x) = act(x W1 + b1) W2 + b2 (eq. 1), a gated one (act(x W1) * x V) W2. With k FFNs side by side in one of
k x d_ff hidden units, W1 stacked, W2 joined and b2 added up, the sum of their outputs is computed exactly.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from prunecli.errors import UsageError
from prunecli.methods.ffn.arrange import FfnPlan, Group
from prunecli.model.changes import FfnChange
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.ffn import FfnLayer
from prunecli.model.rewrite import Rewrite, rewritten
from prunecli.tensors.dtypes import parse_dtype
from prunecli.tensors.stream import (
    Concat,
    Copy,
    Expression,
    Noise,
    Output,
    Slices,
    Sum,
    Zeros,
    joined,
    shape_of,
)


def rewrite_ffn(checkpoint: Checkpoint, plan: FfnPlan) -> Rewrite:
    """The checkpoint with its FFNs as planned, its tensors in the order of the source.

    An FFN that stays as it is, is copied. New hidden units have small random inputs (of the standard deviation that
    the model's weights are drawn with at its making) and outputs of zero: what is computed stays the same, and the
    first step of training moves them.

    Raises:
        UsageError: units that a group has not, or not as many as it shall have.
        CheckpointError: tensors that config.json does not ask for, or lack of some.
    """
    checkpoint.check()
    target = None if plan.dtype is None else parse_dtype(plan.dtype)
    layers = {layer.name: layer for layer in checkpoint.layout.ffns}
    std = initial_std(checkpoint.config)
    made: dict[str, list[Output]] = defaultdict(list)
    for group in plan.groups:
        kept = _checked(group, plan.units.get(group.owner))
        for suffix in layers[group.members[0]].tensors:
            place = f"{group.sources[0]}.{suffix}"
            name = f"{group.owner}.{suffix}"
            expression = _all_blocks(checkpoint, layers, group, suffix, kept, std, f"{plan.seed}:{name}")
            kind = checkpoint.info(place).cast(target).dtype
            made[place].append(Output(name, kind, shape_of(checkpoint, expression, name), expression))
    gone = {name for layer in layers.values() for name in (*layer.tensor_names, *_lost_norms(plan, layer))}
    outputs: list[Output] = []
    for name, info in checkpoint.tensors.items():
        if name in gone:
            outputs += made.get(name, ())
            continue
        outputs.append(Output(name, info.cast(target).dtype, info.shape, Copy(name)))
    structure = checkpoint.structure.changing_ffn(changes(checkpoint, plan, layers))
    return rewritten(checkpoint, structure, tuple(outputs), plan.step, plan.decision)


def changes(checkpoint: Checkpoint, plan: FfnPlan, layers: Mapping[str, FfnLayer]) -> dict[str, FfnChange]:
    """How each dense FFN of the result differs from the stock one."""
    family = checkpoint.require_architecture()
    widths = {stack.side: checkpoint.layout.sizes.count(stack.ffn.width) for stack in family.stacks}
    found = {name: FfnChange(removed=True) for name in plan.removed}
    for group in plan.groups:
        is_stock = group.width == widths[layers[group.owner].side]
        found[group.owner] = FfnChange() if is_stock else FfnChange(width=group.width)
        found |= {name: FfnChange(shared_with=group.owner) for name in group.members[1:]}
    return found


def _all_blocks(
    checkpoint: Checkpoint,
    layers: Mapping[str, FfnLayer],
    group: Group,
    suffix: str,
    units: Sequence[int] | None,
    std: float,
    seed: str,
) -> Expression:
    """One tensor of the group's FFN, new units and all."""
    parts: list[Expression] = []
    member = layers[group.members[0]]
    for block in range(member.blocks[suffix]):
        expression = tensor_expression(checkpoint, layers, group, suffix, units, block)
        own = f"{seed}:{block}" if block else seed
        expression = _widened(checkpoint, layers, group, suffix, expression, std, own)
        parts += expression.parts if isinstance(expression, Concat) else (expression,)
    if len(parts) == 1:
        return parts[0]
    axis = member.tensors[suffix]
    assert axis is not None
    slices = [part for part in parts if isinstance(part, Slices)]
    if len(slices) == len(parts) and len({part.source for part in slices}) == 1:
        name = slices[0].source
        if joined(pair for part in slices for pair in part.ranges) == [
            (0, checkpoint.info(name).shape[axis])
        ]:
            return Copy(name)
    return Concat(axis, tuple(parts))


def tensor_expression(
    checkpoint: Checkpoint,
    layers: Mapping[str, FfnLayer],
    group: Group,
    suffix: str,
    units: Sequence[int] | None = None,
    block: int = 0,
) -> Expression:
    """One tensor of the FFN that the initialisation makes, before new units are added; a block of a fused one.

    Args:
        checkpoint: the source.
        layers: all of its FFNs by name.
        group: whose FFN.
        suffix: name of the tensor, relative to the FFN.
        units: the hidden units that stay; None: all.
        block: which of those in which all hidden units occur.
    """
    tensors, blocks = layers[group.members[0]].tensors, layers[group.members[0]].blocks[suffix]
    axis = tensors[suffix]
    names = [f"{name}.{suffix}" for name in group.sources]
    weight = group.scale if is_output(tensors, suffix) else 1.0
    if group.init != "concat":
        weight /= len(names)
    if axis is None:  # the bias of the output
        return _sum([Copy(name) for name in names], weight)

    def picked(name: str, chosen: Sequence[int] | None) -> Expression:
        width = checkpoint.info(name).shape[axis] // blocks
        if chosen is None:
            return Copy(name) if blocks == 1 else Slices(name, axis, ((block * width, (block + 1) * width),))
        places = (block * width + unit for unit in chosen)
        return Slices(name, axis, tuple(joined((place, place + 1) for place in places)))

    if group.init != "concat":
        return _sum([picked(name, units) for name in names], weight)
    parts, before = [], 0
    for name in names:
        width = checkpoint.info(name).shape[axis] // blocks
        own = None if units is None else [unit - before for unit in units if before <= unit < before + width]
        if own is None or own:
            parts.append(_sum([picked(name, own)], weight))
        before += width
    return parts[0] if len(parts) == 1 else Concat(axis, tuple(parts))


def output_layer(tensors: Mapping[str, Any]) -> str:
    """The linear layer that gives the FFN's output, relative to the FFN: that of its last tensor."""
    return list(tensors)[-1].rpartition(".")[0]


def is_output(tensors: Mapping[str, Any], suffix: str) -> bool:
    """Whether a tensor belongs to the output layer."""
    return suffix.rpartition(".")[0] == output_layer(tensors)


def initial_std(config: Mapping[str, Any]) -> float:
    """Standard deviation with which the model's weights are drawn at its making."""
    value = config.get("initializer_range", config.get("init_std"))
    return float(value) if isinstance(value, (int, float)) and 0 < value < 1 else 0.02


def _widened(
    checkpoint: Checkpoint,
    layers: Mapping[str, FfnLayer],
    group: Group,
    suffix: str,
    expression: Expression,
    std: float,
    seed: str,
) -> Expression:
    """`expression` and the new hidden units behind it, where there are some."""
    tensors = layers[group.members[0]].tensors
    axis = tensors[suffix]
    if axis is None or group.width <= group.init_width:
        return expression
    shape = list(shape_of(checkpoint, expression, suffix))
    shape[axis] = group.width - group.init_width
    if is_output(tensors, suffix) or len(shape) == 1:
        new: Expression = Zeros(tuple(shape))
    else:
        number = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8], "little")
        new = Noise(tuple(shape), std, number)
    if isinstance(expression, Concat):
        return Concat(axis, (*expression.parts, new))
    return Concat(axis, (expression, new))


def _sum(parts: Sequence[Expression], weight: float) -> Expression:
    """`weight` times the sum; one part by 1 is itself."""
    return parts[0] if len(parts) == 1 and weight == 1 else Sum(tuple(parts), (weight,) * len(parts))


def _checked(group: Group, units: Sequence[int] | None) -> Sequence[int] | None:
    """Whether these are the units to keep of a group."""
    if group.width >= group.init_width:
        return None
    if units is None or len(set(units)) != group.width or not set(units) <= set(range(group.init_width)):
        raise UsageError(
            f"{group.owner} shall keep {group.width} of {group.init_width} hidden units, not {units and len(units)}.",
            "Ids are those of the FFN that --init makes.",
        )
    return sorted(units)


def _lost_norms(plan: FfnPlan, layer: FfnLayer) -> tuple[str, ...]:
    return layer.norm_tensors if layer.name in plan.removed else ()
