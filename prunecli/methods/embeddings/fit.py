"""Fit a DeFINE unit to a pretrained table: least reconstruction error of its rows, from the truncated SVD onwards.

All weights are trained at once, by Adam over mini-batches of rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from math import ceil, cos, isfinite, pi

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from prunecli.methods.embeddings.table import (
    Array,
    Projective,
    Table,
    measure,
    moments,
    projective,
    row_weights,
)
from prunecli.model.define import SKIPPING, UnitShape
from prunecli.modules.define import DefineEmbedding
from prunecli.results.rewriting import TableQuality

SMALLEST_DIRECTION = 1e-10
"""Directions of the map table below this part of its largest variance are not used."""

RIDGE = 1e-5
"""Of the features' mean square: keeps nearly equal features apart."""


@dataclass(frozen=True)
class OutputMap:
    """The output layer: logits (h P) U^T.

    Attributes:
        projection: P [m, n]; `DefineOutput.project.weight` is its transpose.
        table: U [V, n].
        quality: of the rows P U^T with their mean; without cosines if U is the map table of the input's unit.
    """

    projection: NDArray[np.float32]
    table: Array
    quality: TableQuality


@dataclass(frozen=True)
class DefineFit:
    """A fitted unit and what it is worth.

    Attributes:
        unit: in float32, on the CPU.
        quality: of the unit.
        baseline: of the projective embedding with the same n.
        start: of the unit before the mini-batches.
        errors: mean error of the rows during each epoch.
        output: the projection for a tied output layer, where it was asked for.
    """

    unit: DefineEmbedding
    quality: TableQuality
    baseline: TableQuality
    start: TableQuality
    errors: tuple[float, ...]
    output: OutputMap | None

    @property
    def parameters_after(self) -> int:
        """Number of parameters of the unit, and of the output's projection if there is one."""
        shape = self.unit.shape
        return shape.parameters + (shape.output_parameters if self.output is not None else 0)

    @property
    def baseline_parameters(self) -> int:
        """Number of parameters of the projective embedding of the same n."""
        shape = self.unit.shape
        plain = UnitShape(shape.vocabulary, shape.map_dim, shape.model_dim, kind="projective")
        return plain.parameters + (shape.output_parameters if self.output is not None else 0)


def fit_define(
    table: Table,
    shape: UnitShape,
    *,
    epochs: int | None = None,
    seed: int = 0,
    counts: NDArray[np.integer] | None = None,
    padding_idx: int | None = None,
    tied_output: bool = False,
) -> DefineFit:
    """Fit a unit of `shape` to the rows of `table`.

    The unit starts as the best projective embedding of the same n (see `initialise` for the one exception). Ridge
    regression then lets the reduction use the random features as well, and Adam fits map table, layers and reduction
    to mini-batches of rows. Should that end above the error that it began with, the unit goes back to its start. The
    kind `projective` needs none of this: its start is its solution. Memory: the unit, twice its map table for Adam,
    and matrices of m x m and k x k; never the table. The same arguments give the same bytes on one machine.

    Args:
        table: E.
        shape: of the unit; its V and m are the table's.
        epochs: passes over the table at most; 0 leaves the unit at its start. If None, as many as come nearest to a
            million rows, from 4 to 60.
        seed: of everything random.
        counts: occurrences of every token in a text [V], to weigh the rows by.
        padding_idx: a row of zeros, which the unit gives back exactly and does not have to learn; None where the
            model has no padding token, or its row is not zero.
        tied_output: also find the projection of hidden states for an output layer that reads the map table.

    Raises:
        CheckpointError: a value of the table is not finite.
    """
    ignored = () if padding_idx is None else (padding_idx,)
    table = replace(table, weights=row_weights(table.vocabulary, counts, ignored))
    mean, covariance = moments(table)
    variance = float(np.trace(covariance))
    table = replace(table, variance=variance if variance > 0 else 1.0)
    first = projective(mean, covariance, shape.map_dim, shape.groups[0] if shape.groups else 1)
    unit = DefineEmbedding(shape, padding_idx=padding_idx)
    baseline = _start(unit, table, first, seed)

    def unit_rows(start: int, stop: int, _rows: object) -> Tensor:
        return unit.rows(start, stop)

    start = quality = measure(table, unit_rows)
    errors: tuple[float, ...] = ()
    if epochs != 0 and unit.layers:
        output_layer = None
        if tied_output:  # U P^T + a constant row, as the truncated SVD gives it
            output_layer = nn.Linear(len(first.scales), len(first.mean))
            output_layer.weight.data.copy_(torch.from_numpy(first.expansion.T))
            output_layer.bias.data.copy_(torch.from_numpy(first.mean))
        errors = train(unit, table, epochs, seed, output_layer)
        quality = measure(table, unit_rows)
        if not quality.error <= start.error:
            _start(unit, table, first, seed)
            quality = start
    output = fit_output(table, unit.map.weight.detach().numpy()) if tied_output else None
    return DefineFit(unit, quality, baseline, start, errors, output)


def _start(unit: DefineEmbedding, table: Table, first: Projective, seed: int) -> TableQuality:
    """Fill the map table, set the layers, solve for the reduction; what the projective embedding itself is worth."""
    lowest = np.full(unit.shape.map_dim, np.inf, np.float32)

    def project(start: int, stop: int, rows: NDArray[np.float32]) -> Tensor:
        mapped = first.mapped(rows)
        np.minimum(lowest, mapped.min(axis=0), out=lowest)
        unit.map.weight[start:stop] = torch.from_numpy(mapped)
        reconstruction = first.expanded(mapped)
        if unit.padding_idx is not None and start <= unit.padding_idx < stop:
            reconstruction[unit.padding_idx - start] = 0
        return reconstruction

    baseline = measure(table, project, "projecting the table")
    initialise(unit, first, lowest, seed)
    if unit.layers:
        refine_reduction(unit, table)
    return baseline


def fit_output(table: Table, mapped: Array) -> OutputMap:
    """Weighted least squares for P in E = U P^T + a constant row, from one pass over both tables, in float64.

    Adding one vector to every row of E adds the same number to all logits h E^T = (h P) U^T of a position, which no
    softmax sees. So P is the best projection of the rows without their mean: U P^T is as near to E as it can be up to
    that one vector.

    Args:
        table: E.
        mapped: U [V, n].

    Raises:
        CheckpointError: a value of E is not finite.
    """
    map_dim = mapped.shape[1]
    joined = replace(
        table,
        model_dim=map_dim + table.model_dim,
        read=lambda start, stop: np.concatenate([mapped[start:stop], table.rows(start, stop)], axis=1),
    )
    _, covariance = moments(joined)
    own, across = np.split(covariance[:map_dim], [map_dim], axis=1)
    variance = float(np.trace(covariance[map_dim:, map_dim:]))
    projection = np.linalg.pinv(own, rcond=SMALLEST_DIRECTION, hermitian=True) @ across
    explained = float((2 * projection * across).sum() - ((own @ projection) * projection).sum())
    quality = TableQuality(explained_variance=explained / variance if variance > 0 else 1.0)
    return OutputMap(projection.T.astype(np.float32), mapped, quality)


@torch.no_grad()
def refine_reduction(unit: DefineEmbedding, table: Table) -> None:
    """Add to the reduction the solution D of min sum of w |e - o - D f|^2 + ridge |D|^2 over the rows' features f.

    D = 0 is among the choices, so the weighted squared error never rises. f is the expansion and a constant 1. Without
    the reduction the last layer takes its place: each of its groups has a problem of its own, with the group's input
    and a constant 1 as f; where the groups share a block, one D without its constants solves all.

    Raises:
        CheckpointError: a value of the table is not finite.
    """
    groups = 1 if unit.reduce is not None else unit.shape.groups[-1]
    inputs = unit.shape.features if unit.reduce is not None else unit.shape.layers[-1].inputs
    width, outputs = inputs // groups + 1, table.model_dim // groups
    products = torch.zeros(groups, width, width, dtype=torch.float64)
    missing = torch.zeros(groups, width, outputs, dtype=torch.float64)
    for start, stop, rows in table.chunks("solving for the reduction"):
        mapped = unit.map.weight[start:stop]
        *stages, reconstruction = unit.stages(mapped)
        features = stages[-1]  # the inputs of the last linear step
        if unit.reduce is None:
            features = unit.inputs(len(unit.layers) - 1, mapped, features)
        root = torch.from_numpy(table.weights[start:stop]).sqrt().view(-1, 1, 1)
        difference = (torch.from_numpy(rows) - reconstruction).view(-1, groups, outputs) * root
        known = (
            torch.cat([features.view(len(rows), groups, -1), torch.ones(len(rows), groups, 1)], dim=2) * root
        )
        products += torch.einsum("rgi,rgj->gij", known, known).double()
        missing += torch.einsum("rgi,rgo->gio", known, difference).double()
    if unit.shape.shared_blocks and groups > 1:  # one block for all, each group's constants eliminated first
        total, means = products[0, -1, -1], products[:, :-1, -1:]
        own = products[:, :-1, :-1] - means @ means.mT / total
        across = missing[:, :-1] - means @ missing[:, -1:] / total
        block = _ridge(own.sum(0), across.sum(0))
        added = block.unsqueeze(0)
        constants = ((missing[:, -1] - means.squeeze(-1) @ block) / total).flatten()
    else:
        solutions = _ridge(products, missing)
        added, constants = solutions[:, :-1], solutions[:, -1].flatten()
    if unit.reduce is not None:
        unit.reduce.weight.add_(added[0].T)
        unit.reduce.bias.add_(constants)
    else:
        weight, bias = unit.group_layer(len(unit.layers) - 1)
        weight.add_(added)
        bias.add_(constants)


def _ridge(products: Tensor, missing: Tensor) -> Tensor:
    """Solution of each least-squares problem, from X^T X and X^T Y."""
    diagonal = products.diagonal(dim1=-2, dim2=-1)
    diagonal += RIDGE * diagonal.mean(dim=-1, keepdim=True)
    return torch.cholesky_solve(missing, torch.linalg.cholesky(products))


BATCH_ROWS = 256
"""Rows of a mini-batch."""
LEARNING_RATE, MAP_LEARNING_RATE = 2e-3, 5e-2
"""Highest rates of the layers and of the map table, whose columns start with variance 1; they fall along a cosine."""
RUN_ROWS = 32
"""Rows of a mini-batch come in runs of this many neighbours; each run is one read."""
PLAIN_WIDTH = 512
"""Widest reduction whose weights take the whole learning rate; wider ones take less, in inverse proportion."""
WARM_UP = 0.05
"""Part of the steps over which the learning rate rises."""
TOLERANCE = 1e-3
"""From half way on, the fit stops after a pass that lowers the error by less than this part."""
ROWS_SEEN = 1_000_000
LEAST_EPOCHS, MOST_EPOCHS = 4, 60
"""Where no number of epochs is given, they come nearest to `ROWS_SEEN` rows within these bounds."""


def train(
    unit: DefineEmbedding,
    table: Table,
    epochs: int | None,
    seed: int,
    output: nn.Module | None = None,
) -> tuple[float, ...]:
    """Lower the error of the unit's rows; each row of the map table has Adam moments of its own.

    Args:
        unit: in float32; changed in place.
        table: the rows to come near to.
        epochs, seed: as of `fit_define`.
        output: map vectors [B, n] -> rows [B, m]: trained beside the unit, and left to the caller, who knows the exact
            solution for a given map table.

    Returns:
        The mean error during each pass, without the output's.

    Raises:
        CheckpointError: a value of the table is not finite.
    """
    passes = epochs or min(max(round(ROWS_SEEN / table.vocabulary), LEAST_EPOCHS), MOST_EPOCHS)
    run = _run(table)
    total = passes * ceil(table.vocabulary / (BATCH_ROWS // run * run))
    warm = max(round(WARM_UP * total), 1)

    def part_of_rate(number: int) -> float:
        """Fraction of the highest learning rate: a linear rise, then half a cosine down to 0."""
        if number < warm:
            return (number + 1) / warm
        return 0.5 * (1 + cos(pi * (number - warm) / max(total - warm, 1)))

    dense = [value for name, value in unit.named_parameters() if name != "map.weight"]
    rate = LEARNING_RATE * min(PLAIN_WIDTH / unit.shape.features, 1)
    optimizers = [
        torch.optim.Adam([*dense, *(output.parameters() if output else ())], lr=rate),
        torch.optim.SparseAdam([unit.map.weight], lr=MAP_LEARNING_RATE),
    ]
    schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, part_of_rate) for optimizer in optimizers]
    errors: list[float] = []
    for epoch in range(passes):
        summed = 0.0
        so_far = f" (error {errors[-1]:.4f})" if errors else ""
        with table.progress(
            f"fitting, pass {epoch + 1} of {passes}{so_far}", table.vocabulary, "rows"
        ) as advance:
            for numbers, batch in batches(table, seed, epoch):
                mapped = functional.embedding(numbers, unit.map.weight, sparse=True)
                loss = own = table.loss(numbers, batch, unit.transform(mapped))
                if output is not None:
                    loss = own + table.loss(numbers, batch, output(mapped))
                for optimizer in optimizers:
                    optimizer.zero_grad()
                torch.autograd.backward(loss)
                for optimizer, schedule in zip(optimizers, schedules, strict=True):
                    optimizer.step()
                    schedule.step()
                summed += float(own.detach()) * len(numbers)
                advance(len(numbers))
        errors.append(summed / table.vocabulary)
        is_slow = 2 * epoch >= passes and errors[-2] - errors[-1] < TOLERANCE * errors[-2]
        if is_slow or not isfinite(errors[-1]):
            break
    return tuple(errors)


def _run(table: Table) -> int:
    return min(RUN_ROWS, BATCH_ROWS, table.vocabulary)


def batches(table: Table, seed: int, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Numbers [B] and rows [B, m] of mini-batches that cover the table once; its runs come in random order.

    Raises:
        CheckpointError: a value of the table is not finite.
    """
    run = _run(table)
    starts = np.random.default_rng((seed, epoch)).permutation(np.arange(0, table.vocabulary, run))
    together = BATCH_ROWS // run
    for place in range(0, len(starts), together):
        spans = [
            (start, min(start + run, table.vocabulary)) for start in starts[place : place + together].tolist()
        ]
        numbers = np.concatenate([np.arange(*span) for span in spans])
        rows = np.concatenate([table.rows(*span) for span in spans])
        yield torch.from_numpy(numbers), torch.from_numpy(rows)


LINEAR_FROM = 6.0
"""gelu(x) = x to 1e-8 for every x above this."""


@torch.no_grad()
def initialise(unit: DefineEmbedding, start: Projective, lowest: NDArray[np.float32], seed: int) -> None:
    """Set every weight but the map table's, to make the unit the best projective embedding of the same n.

    That needs all of the n values to reach each of the m, which they do but for three cases: the kind `hgt-no-mixing`
    where the last layer has several groups, of which the first alone reads most of e and may have no room for it;
    shuffled groups that share a block, for the same reason; several groups in the last layer without the reduction.

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
    """
    shape, last = unit.shape, len(unit.layers) - 1
    generator = torch.Generator().manual_seed(seed)
    expansion, mean = torch.from_numpy(start.expansion), torch.from_numpy(start.mean)
    plain = torch.eye(shape.map_dim, dtype=torch.float64)
    # `carried[v]` times a layer's output is value v of e plus `offsets[v]`; if v is not carried, `carried[v]` is zero.
    carried, offsets = plain, plain.new_zeros(shape.map_dim)
    for number in range(last + 1):
        if number and shape.kind in SKIPPING:  # these layers read e again
            carried = plain.new_zeros(shape.map_dim, shape.widths[number - 1])
        read = unit.inputs(number, plain, carried)
        blocks, bias = unit.group_layer(number)
        groups, (_, inputs, room) = shape.groups[number], blocks.shape
        parts = read.view(-1, groups, inputs)
        if number == last and not shape.reduction:
            # e_o = mean + x expansion from the last layer itself: of x, each group has what `parts` reads in it.
            expansion = expansion.reshape(shape.map_dim, groups, -1)
            blocks.zero_()
            bias.copy_(mean)
            if shape.kind == "hgt-residual" and len(shape.layers) > 1:  # the input is added once more
                blocks.sub_(torch.eye(inputs, room))
            if len(blocks) == groups:
                blocks.add_(torch.einsum("ngi,ngo->gio", parts, expansion))
                bias.sub_(
                    torch.einsum("n,ng,ngo->go", offsets, parts.any(dim=2).double(), expansion).flatten()
                )
            return
        fresh = torch.randn(blocks.shape, generator=generator) * (1 + (number > 0)) ** 0.5
        blocks.copy_(fresh / inputs**0.5)
        # Random units read carried values less their offsets.
        shift = (offsets @ read).view(groups, 1, inputs)
        bias.copy_(-(shift @ blocks.double()).flatten())
        if number and shape.kind == "hgt-residual":
            # Units to which a residual connection adds a carried value give 0.
            used = read.any(dim=0).view(groups, room)
            blocks.mul_(~(used.any(dim=0, keepdim=True) if shape.shared_blocks else used).unsqueeze(1))
            bias[used.flatten()] = 0
            carried = read
        elif number == last or shape.kind not in SKIPPING:
            # Whether two units of a group are always read by the same group of the next layer.
            if number == last or shape.kind == "hgt-residual":
                pairs = True
            elif shape.kind == "group-linear-shuffle":
                pairs = groups == 1
            else:
                pairs = groups % shape.groups[number + 1] == 0
            carried, offsets = _carry(blocks, bias, parts, offsets, lowest, pairs=pairs)
    assert unit.reduce is not None
    unit.reduce.weight.copy_(expansion.T @ carried)
    unit.reduce.bias.copy_(mean - offsets @ expansion)


def _carry(
    blocks: Tensor,
    bias: Tensor,
    parts: Tensor,
    offsets: Tensor,
    lowest: NDArray[np.float32],
    *,
    pairs: bool,
) -> tuple[Tensor, Tensor]:
    """Let the first units of each block pass the values on that `parts` `[n, groups, inputs]` reads, all of one group.

    Returns:
        `[n, outputs]` and `[n]`: `carried` and `offsets` for the output, see `initialise`.
    """
    room, group_of = blocks.shape[2], parts.any(dim=2).int().argmax(dim=1).tolist()
    members: list[dict[tuple[float, ...], list[int]]] = [{} for _ in blocks]
    for number, group in enumerate(group_of):
        local = tuple(parts[number, group].tolist())
        if any(local):
            members[group % len(blocks)].setdefault(local, []).append(number)
    moved, added = parts.new_zeros(len(parts), len(bias)), torch.zeros_like(offsets)
    for block, held in zip(blocks, members, strict=True):
        doubled = min(len(held), max(room - len(held), 0)) if pairs else 0
        column = 0
        for position, (local, numbers) in enumerate(islice(held.items(), room)):
            is_pair = position < doubled
            for sign in (1.0, -1.0) if is_pair else (1.0,):
                block[:, column] = sign * torch.tensor(local)
                for number in numbers:
                    place = group_of[number] * room + column
                    added[number] = 0.0 if is_pair else max(0.0, -float(lowest[number])) + LINEAR_FROM
                    bias[place] = added[number] - sign * offsets[number]
                    moved[number, place] = sign
                column += 1
    return moved, added
