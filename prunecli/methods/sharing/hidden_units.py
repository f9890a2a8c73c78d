"""What each tensor of a shared, narrower or wider FFN is made of, and how much its hidden units weigh.

An FFN is FFN(x) = act(x W1 + b1) W2 + b2 (eq. 1), a gated one (act(x W1) * x V) W2. With k FFNs side by side in one of
k x d_ff hidden units, W1 stacked, W2 joined and b2 added up, the sum of their outputs is computed exactly.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from prunecli.methods.sharing.arrange import Group
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.ffn import FfnLayer
from prunecli.tensors.computing import values
from prunecli.tensors.stream import (
    Concat,
    Copy,
    Expression,
    Noise,
    Slices,
    Sum,
    Zeros,
    joined,
    shape_of,
)


def ffn_tensor(
    checkpoint: Checkpoint,
    layers: Mapping[str, FfnLayer],
    group: Group,
    suffix: str,
    units: Sequence[int] | None,
    seed: str,
) -> Expression:
    """One tensor of a group's FFN, new hidden units and all; a copy where the FFN stays as it is.

    New hidden units have small random inputs (of the standard deviation that the model's weights are drawn with at its
    making) and outputs of zero: what is computed stays the same, and the first step of training moves them.

    Args:
        seed: seed of new hidden units.
        checkpoint, layers, group, suffix, units: as for `tensor_expression`.
    """
    if not group.is_merged:
        return Copy(f"{group.sources[0]}.{suffix}")
    member = layers[group.owner]
    axis = member.tensors[suffix]
    parts: list[Expression] = []
    for block in range(member.blocks[suffix]):
        expression = tensor_expression(checkpoint, layers, group, suffix, units, block)
        parts += expression.parts if isinstance(expression, Concat) else (expression,)
        if axis is None or group.width <= group.init_width:
            continue
        shape = list(shape_of(checkpoint, expression, suffix))
        shape[axis] = group.width - group.init_width
        if is_output(member.tensors, suffix) or len(shape) == 1:
            parts.append(Zeros(tuple(shape)))
        else:
            own_seed = f"{seed}:{block}" if block else seed
            number = int.from_bytes(hashlib.sha256(own_seed.encode()).digest()[:8], "little")
            parts.append(Noise(tuple(shape), initial_std(checkpoint.config), number))
    if axis is None or len(parts) == 1:
        return parts[0]
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
        group: the group of the FFN.
        suffix: name of the tensor, relative to the FFN.
        units: the hidden units that stay. If None, all.
        block: number of the block, if the tensor holds the hidden units several times.
    """
    tensors, blocks = layers[group.members[0]].tensors, layers[group.members[0]].blocks[suffix]
    axis = tensors[suffix]
    names = [f"{name}.{suffix}" for name in group.sources]
    weight = group.scale if is_output(tensors, suffix) else 1.0
    if group.init != "concat":
        weight /= len(names)
    if axis is None:  # the bias of the output
        return weighted_sum([Copy(name) for name in names], weight)

    def picked(name: str, chosen: Sequence[int] | None) -> Expression:
        width = checkpoint.info(name).shape[axis] // blocks
        if chosen is None and blocks == 1:
            return Copy(name)
        places = (block * width + unit for unit in (range(width) if chosen is None else chosen))
        return Slices(name, axis, tuple(joined((place, place + 1) for place in places)))

    if group.init != "concat":
        return weighted_sum([picked(name, units) for name in names], weight)
    parts, before = [], 0
    for name in names:
        width = checkpoint.info(name).shape[axis] // blocks
        own = None if units is None else [unit - before for unit in units if before <= unit < before + width]
        if own is None or own:
            parts.append(weighted_sum([picked(name, own)], weight))
        before += width
    return parts[0] if len(parts) == 1 else Concat(axis, tuple(parts))


def output_layer(tensors: Mapping[str, Any]) -> str:
    """Name of the linear layer that gives the FFN's output, relative to the FFN: it holds the last tensor."""
    return list(tensors)[-1].rpartition(".")[0]


def is_output(tensors: Mapping[str, Any], suffix: str) -> bool:
    """Whether a tensor belongs to the output layer."""
    return suffix.rpartition(".")[0] == output_layer(tensors)


def initial_std(config: Mapping[str, Any]) -> float:
    """Standard deviation with which the model's weights are drawn at its making."""
    value = config.get("initializer_range", config.get("init_std"))
    return float(value) if isinstance(value, (int, float)) and 0 < value < 1 else 0.02


def weighted_sum(parts: Sequence[Expression], weight: float) -> Expression:
    """`weight` times the sum; one part by 1 is itself."""
    return parts[0] if len(parts) == 1 and weight == 1 else Sum(tuple(parts), (weight,) * len(parts))


def unit_norms(
    checkpoint: Checkpoint, layers: Mapping[str, FfnLayer], group: Group, *, output_only: bool = False
) -> np.ndarray:
    """The product over the FFN's matrices of the l2 norm of a unit's part: ||row of W1|| x ||column of W2||.

    The FFN is the one that the group's initialisation makes; its weights are read block by block.

    Args:
        output_only: ||column of W2|| alone, what an activation of 1 adds to the output.

    Returns:
        `[init_width]`, float64.

    Raises:
        CheckpointError: a file ends early.
    """
    product = np.ones(group.init_width)
    member = layers[group.members[0]]
    matrices = [
        (suffix, axis, block)
        for suffix, axis in member.tensors.items()
        if axis is not None and suffix.endswith("weight")
        if not output_only or is_output(member.tensors, suffix)
        for block in range(member.blocks[suffix])
    ]
    for suffix, axis, block in matrices:
        squares, row = np.zeros(group.init_width), 0
        expression = tensor_expression(checkpoint, layers, group, suffix, block=block)
        for rows in values(checkpoint, expression, "F64"):
            if axis == 0:
                squares[row : row + len(rows)] = np.square(rows).sum(axis=1)
                row += len(rows)
            else:
                squares += np.square(rows).sum(axis=0)
        product *= np.sqrt(squares)
    return product
