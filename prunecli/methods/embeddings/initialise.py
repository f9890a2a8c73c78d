"""Initial weights of a DeFINE unit: those that make it the best projective embedding of the same n.

Each of the n values of e is carried to the last expansion layer: by two units, as gelu(x) - gelu(-x) = x, or where a
group has no room for that, by one whose bias keeps it where gelu(x + c) = x + c. Kinds with the skip connection read e
again in their last layer, so only that one carries; the others carry from layer to layer, or leave what is carried to
the residual connections. The reduction multiplies what is carried by the truncated SVD. The remaining units start
random, and the reduction ignores them. Where one block serves all groups of a layer, a unit carries the same place of
each.

Without the reduction the last layer multiplies what the layers before it carry by the truncated SVD. With several
groups each of them makes a part of the m values from the part of e that it reads: the start is that part of the SVD;
where these groups share a block besides, it is the mean row. The regression that follows improves on both.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prunecli.methods.embeddings.table import Projective
from prunecli.model.define import SKIPPING, UnitShape
from prunecli.modules.define import DefineEmbedding

LINEAR_FROM = 6.0
"""gelu(x) = x to 1e-8 for every x above this."""


@dataclass(frozen=True)
class Carried:
    """A value of e as layers see it: sum of sign * input[place] over `places`, minus `offset`."""

    places: tuple[tuple[int, float], ...]
    offset: float = 0.0

    def moved(self, to: Sequence[int]) -> Carried:
        """The same value where input p lies at `to[p]`."""
        return Carried(tuple((to[place], sign) for place, sign in self.places), self.offset)


def input_places(shape: UnitShape, layer: int) -> tuple[list[int], list[int]]:
    """Where the values of e, and those of the previous output, lie in the input of a layer after the first (3.3)."""
    previous = shape.widths[layer - 1]
    groups = shape.groups[layer]
    if shape.kind == "group-linear-shuffle":
        part = previous // groups
        return [], [place % part * groups + place // part for place in range(previous)]
    if shape.kind not in SKIPPING:
        return [], list(range(previous))
    if shape.kind != "define":
        return list(range(shape.map_dim)), list(range(shape.map_dim, shape.map_dim + previous))
    own, other = shape.map_dim // groups, previous // groups
    return (
        [place // own * (own + other) + place % own for place in range(shape.map_dim)],
        [place // other * (own + other) + own + place % other for place in range(previous)],
    )


@torch.no_grad()
def initialise(unit: DefineEmbedding, start: Projective, lowest: NDArray[np.float32], seed: int = 0) -> int:
    """Set every weight but the map table's; the map table has to hold the rows `start.mapped(...)`.

    Args:
        unit: in float32.
        start: the projective embedding.
        lowest: the smallest value of each column of the map table [n], for the offsets c.
        seed: of the random units.

    Returns:
        How many of the n values reach every one of the m. All of them, so that the unit is the projective embedding,
        but for three: the kind `hgt-no-mixing` where the last layer has several groups, of which the first alone reads
        most of e and may have no room for it; shuffled groups that share a block, for the same reason; several groups
        in the last layer without the reduction (0).
    """
    shape = unit.shape
    generator = torch.Generator().manual_seed(seed)
    plain: list[Carried | None] = [Carried(((place, 1.0),)) for place in range(shape.map_dim)]
    carried = plain
    last = len(shape.layers) - 1
    for number in range(last + 1):
        if number:
            own, previous = input_places(shape, number)
            read_again = [value.moved(own) if value and own else None for value in plain]
            carried = [
                again or (value.moved(previous) if value else None)
                for again, value in zip(read_again, carried, strict=True)
            ]
        blocks, bias = unit.group_layer(number)
        fresh = torch.randn(blocks.shape, generator=generator) * (1 + (number > 0)) ** 0.5
        blocks.copy_(fresh / blocks.shape[1] ** 0.5)
        bias.zero_()
        weight = blocks.expand(shape.groups[number], -1, -1)
        if number == last and not shape.reduction:
            _finish(blocks, bias, start, carried, shape)
            return len(carried) if shape.groups[last] == 1 else 0
        if number and shape.kind == "hgt-residual":
            _leave_alone(weight, bias, carried)
        elif number == last or shape.kind not in SKIPPING:
            pairs = number == last or _pairs_stay_together(shape, number)
            carried = _carry(weight, bias, carried, lowest, pairs=pairs, shared=shape.shared_blocks)
    _reduce(unit, start, carried)
    return sum(value is not None for value in carried)


def _pairs_stay_together(shape: UnitShape, layer: int) -> bool:
    """Whether two units of a group are always read by the same group of the next layer."""
    if shape.kind == "group-linear-shuffle":
        return shape.groups[layer] == 1
    return shape.kind == "hgt-residual" or shape.groups[layer] % shape.groups[layer + 1] == 0


def _leave_alone(weight: Tensor, bias: Tensor, values: Sequence[Carried | None]) -> None:
    """Units to which a residual connection adds a carried value give 0."""
    _undo_offsets(weight, bias, values)
    room = weight.shape[2]
    for value in values:
        for place, _ in value.places if value is not None else ():
            weight[place // room, :, place % room] = 0
            bias[place] = 0


def _carry(
    weight: Tensor,
    bias: Tensor,
    values: Sequence[Carried | None],
    lowest: NDArray[np.float32],
    *,
    pairs: bool,
    shared: bool,
) -> list[Carried | None]:
    """Let the first units of each block pass `values` on; where they lie in the output."""
    _, inputs, room = weight.shape
    _undo_offsets(weight, bias, values)
    by_block: dict[int, dict[tuple[tuple[int, float], ...], list[tuple[int, int]]]] = defaultdict(dict)
    for number, value in enumerate(values):
        if value is not None:
            group = value.places[0][0] // inputs
            local = tuple((place % inputs, sign) for place, sign in value.places)
            by_block[0 if shared else group].setdefault(local, []).append((number, group))
    moved: list[Carried | None] = [None] * len(values)
    for members in by_block.values():
        doubled = min(len(members), max(room - len(members), 0)) if pairs else 0
        unit = 0
        for position, (local, carriers) in enumerate(islice(members.items(), room)):
            signs = (1.0, -1.0) if position < doubled else (1.0,)
            units = range(unit, unit + len(signs))
            unit += len(signs)
            for number, group in carriers:
                value = values[number]
                assert value is not None
                offset = 0.0 if len(signs) == 2 else max(0.0, -float(lowest[number])) + LINEAR_FROM
                for column, sign in zip(units, signs, strict=True):
                    weight[group, :, column] = 0
                    for place, factor in local:
                        weight[group, place, column] = sign * factor
                    bias[group * room + column] = offset - sign * value.offset
                places = tuple(
                    (group * room + column, sign) for column, sign in zip(units, signs, strict=True)
                )
                moved[number] = Carried(places, offset)
    return moved


def _undo_offsets(weight: Tensor, bias: Tensor, values: Sequence[Carried | None]) -> None:
    """Random units read carried values less their offsets."""
    _, inputs, room = weight.shape
    for value in values:
        if value is not None and value.offset:
            group, place = divmod(value.places[0][0], inputs)
            bias[group * room : (group + 1) * room] -= value.offset * weight[group, place]


def _reduce(unit: DefineEmbedding, start: Projective, carried: Sequence[Carried | None]) -> None:
    """e_o = mean + x expansion, from where x is carried."""
    expansion = start.expansion
    weight = np.zeros((unit.shape.features, unit.shape.model_dim))
    bias = start.mean.copy()
    for number, value in enumerate(carried):
        if value is not None:
            for place, sign in value.places:
                weight[place] = sign * expansion[number]
            bias -= value.offset * expansion[number]
    assert unit.reduce is not None
    unit.reduce.weight.copy_(torch.from_numpy(weight.T))
    unit.reduce.bias.copy_(torch.from_numpy(bias))


def _finish(
    weight: Tensor, bias: Tensor, start: Projective, carried: Sequence[Carried | None], shape: UnitShape
) -> None:
    """e_o = mean + x expansion from the last layer itself: of x, each group has what is carried to it."""
    groups, (_, inputs, room) = shape.groups[-1], weight.shape
    expansion = torch.from_numpy(start.expansion).float().view(-1, groups, room)
    weight.zero_()
    bias.copy_(torch.from_numpy(start.mean))
    if shape.kind == "hgt-residual" and len(shape.layers) > 1:  # the input is added once more
        weight -= torch.eye(inputs, room)
    if shape.shared_blocks and groups > 1:
        return
    for number, value in enumerate(carried):
        if value is not None:
            group = value.places[0][0] // inputs
            part = expansion[number, group]
            for place, sign in value.places:
                weight[group, place % inputs] += sign * part
            bias[group * room : (group + 1) * room] -= value.offset * part
