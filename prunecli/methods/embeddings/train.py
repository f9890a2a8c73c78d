"""Initial weights of a DeFINE unit, and its training: Adam over mini-batches of a table's rows, all weights at once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from math import ceil, cos, isfinite, pi

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from prunecli.methods.embeddings.table import Goal, Projective, Table
from prunecli.model.define import SKIPPING, UnitShape
from prunecli.modules.define import DefineEmbedding
from prunecli.progress import Progress, silent

RUN_ROWS = 32
"""Rows of a mini-batch come in runs of this many neighbours; each run is one read."""
PLAIN_WIDTH = 512
"""Widest reduction whose weights take the whole learning rate."""
WARM_UP = 0.05
"""Part of the steps over which the learning rate rises."""
ROWS_SEEN = 1_000_000
LEAST_EPOCHS, MOST_EPOCHS = 4, 60
"""Where no number of epochs is given, they come nearest to `ROWS_SEEN` rows within these bounds."""


@dataclass(frozen=True)
class FitOptions:
    """How long and how hard to fit.

    Attributes:
        epochs: passes over the table at most; 0 leaves the unit at its start. None: as many as come nearest to a
            million rows, from 4 to 60.
        batch_rows: rows of a mini-batch.
        learning_rate: of the layers at its highest; it falls to 0 along a cosine. Units wider than `PLAIN_WIDTH` take
            less, in inverse proportion to their width.
        map_learning_rate: of the map table, whose columns start with variance 1.
        cosine_weight: of 1 - cosine beside the squared error.
        output_weight: of the error of U P^T beside that of the unit, where the output layer reads the map table U.
        tolerance: from half way on, stop after a pass that lowers the error by less than this part.
        power: of the token frequencies as weights of the rows.
        seed: of everything random.
    """

    epochs: int | None = None
    batch_rows: int = 256
    learning_rate: float = 2e-3
    map_learning_rate: float = 5e-2
    cosine_weight: float = 0.2
    output_weight: float = 1.0
    tolerance: float = 1e-3
    power: float = 0.5
    seed: int = 0

    def passes(self, vocabulary: int) -> int:
        """Passes over a table of `vocabulary` rows."""
        if self.epochs is not None:
            return self.epochs
        return min(max(round(ROWS_SEEN / vocabulary), LEAST_EPOCHS), MOST_EPOCHS)


def train(
    unit: DefineEmbedding,
    table: Table,
    goal: Goal,
    options: FitOptions,
    output: nn.Module | None = None,
    progress: Progress = silent,
) -> tuple[float, ...]:
    """Lower the error of the unit's rows; each row of the map table has Adam moments of its own.

    Args:
        unit: in float32; changed in place.
        table: the rows to come near to.
        goal: the error.
        options: epochs, rates and weights.
        output: map vectors [B, n] -> rows [B, m]: trained beside the unit with `options.output_weight`, and left to
            the caller, who knows the exact solution for a given map table.
        progress: told of the rows; the name of each line holds the error so far.

    Returns:
        The mean error during each pass, without the output's.

    Raises:
        CheckpointError: a value of the table is not finite.
    """
    passes = options.passes(table.vocabulary)
    step = _stepper(unit, goal, options, output, passes * _steps(table, options))
    errors: list[float] = []
    for epoch in range(passes):
        total, rows = 0.0, 0
        so_far = f" (error {errors[-1]:.4f})" if errors else ""
        with progress(f"fitting, pass {epoch + 1} of {passes}{so_far}", table.vocabulary, "rows") as advance:
            for numbers, batch in batches(table, options, epoch):
                total += step(numbers, batch) * len(numbers)
                rows += len(numbers)
                advance(len(numbers))
        errors.append(total / rows)
        if not isfinite(errors[-1]):
            break
        if 2 * epoch >= passes and errors[-2] - errors[-1] < options.tolerance * errors[-2]:
            break
    return tuple(errors)


def _stepper(
    unit: DefineEmbedding, goal: Goal, options: FitOptions, output: nn.Module | None, total: int
) -> Callable[[Tensor, Tensor], float]:
    """One step of both optimizers on a mini-batch; the unit's error before it."""
    dense = [value for name, value in unit.named_parameters() if name != "map.weight"]
    rate = options.learning_rate * min(PLAIN_WIDTH / unit.shape.features, 1)
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Adam([*dense, *(output.parameters() if output else ())], lr=rate),
        torch.optim.SparseAdam([unit.map.weight], lr=options.map_learning_rate),
    ]
    warm = max(round(WARM_UP * total), 1)

    def part_of_rate(number: int) -> float:
        """Fraction of the highest learning rate: a linear rise, then half a cosine down to 0."""
        if number < warm:
            return (number + 1) / warm
        return 0.5 * (1 + cos(pi * (number - warm) / max(total - warm, 1)))

    schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, part_of_rate) for optimizer in optimizers]

    def step(numbers: Tensor, batch: Tensor) -> float:
        mapped = functional.embedding(numbers, unit.map.weight, sparse=True)
        loss = own = goal.loss(numbers, batch, unit.transform(mapped))
        if output is not None:
            loss = own + options.output_weight * goal.loss(numbers, batch, output(mapped))
        for optimizer in optimizers:
            optimizer.zero_grad()
        torch.autograd.backward(loss)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        return float(own.detach())

    return step


def _run(table: Table, options: FitOptions) -> int:
    return min(RUN_ROWS, options.batch_rows, table.vocabulary)


def _steps(table: Table, options: FitOptions) -> int:
    run = _run(table, options)
    return ceil(ceil(table.vocabulary / run) / (options.batch_rows // run))


def batches(table: Table, options: FitOptions, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Numbers [B] and rows [B, m] of mini-batches that cover the table once; its runs come in random order.

    Raises:
        CheckpointError: a value of the table is not finite.
    """
    run = _run(table, options)
    starts = np.random.default_rng((options.seed, epoch)).permutation(np.arange(0, table.vocabulary, run))
    together = options.batch_rows // run
    for place in range(0, len(starts), together):
        spans = [
            (start, min(start + run, table.vocabulary)) for start in starts[place : place + together].tolist()
        ]
        numbers = np.concatenate([np.arange(*span) for span in spans])
        rows = np.concatenate([table.rows(*span) for span in spans])
        yield torch.from_numpy(numbers), torch.from_numpy(rows)


LINEAR_FROM = 6.0
"""gelu(x) = x to 1e-8 for every x above this."""


@dataclass(frozen=True)
class Carried:
    """A value of e as layers see it: sum of sign * input[place] over `places`, minus `offset`."""

    places: tuple[tuple[int, float], ...]
    offset: float = 0.0

    def moved(self, to: Sequence[int]) -> Carried:
        """This value for a layer whose input p lies at `to[p]`."""
        return Carried(tuple((to[place], sign) for place, sign in self.places), self.offset)


def input_places(shape: UnitShape, layer: int) -> tuple[list[int], list[int]]:
    """Places of the values of e, and of the previous output, in the input of a layer after the first (3.3)."""
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
    """Set every weight but the map table's, to make the unit the best projective embedding of the same n.

    The map table has to hold the rows `start.mapped(...)`. Each of the n values of e is carried to the last expansion
    layer: by two units, as gelu(x) - gelu(-x) = x, or where a group has no room for that, by one whose bias keeps it
    where gelu(x + c) = x + c. Kinds with the skip connection read e again in their last layer, so only that one
    carries; the others carry from layer to layer, or leave what is carried to the residual connections. The reduction
    multiplies what is carried by the truncated SVD. The remaining units start random, and the reduction ignores them.
    Where one block serves all groups of a layer, a unit carries the same place of each.

    Without the reduction the last layer multiplies what the layers before it carry by the truncated SVD. With several
    groups each of them makes a part of the m values from the part of e that it reads: the start is that part of the
    SVD; where these groups share a block besides, it is the mean row. The regression that follows improves on both.

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
            # Units to which a residual connection adds a carried value give 0.
            _undo_offsets(weight, bias, carried)
            room = weight.shape[2]
            for value in carried:
                for place, _ in value.places if value is not None else ():
                    weight[place // room, :, place % room] = 0
                    bias[place] = 0
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
