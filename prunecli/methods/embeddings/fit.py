"""Fit a DeFINE unit to a pretrained table: least reconstruction error of its rows, from the truncated SVD onwards."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from prunecli.methods.embeddings.table import (
    Array,
    Goal,
    Projective,
    Quality,
    Table,
    measure,
    moments,
    projective,
    row_weights,
)
from prunecli.methods.embeddings.train import FitOptions, initialise, train
from prunecli.model.define import UnitShape
from prunecli.modules.define import DefineEmbedding
from prunecli.progress import Progress, silent

SMALLEST_DIRECTION = 1e-10
"""Directions of the map table below this part of its largest variance are not used."""

RIDGE = 1e-5
"""Of the features' mean square: keeps nearly equal features apart."""


@dataclass(frozen=True)
class OutputMap:
    """The output layer: logits (h P) U^T.

    Attributes:
        projection: P [m, n]; `DefineOutput.project.weight` is its transpose.
        explained_variance: 1 - sum of w |e - mean - P (u - mean)|^2 over sum of w |e - mean|^2.
        table: U [V, n]. If None, the map table of the input's unit.
        quality: quality of the rows P U^T with their mean, if it was measured.
    """

    projection: NDArray[np.float32]
    explained_variance: float
    table: Array | None = None
    quality: Quality | None = None


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
    quality: Quality
    baseline: Quality
    start: Quality
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
    options: FitOptions | None = None,
    *,
    counts: NDArray[np.integer] | None = None,
    padding_idx: int | None = None,
    tied_output: bool = False,
    progress: Progress = silent,
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
        options: how long and how hard; the default is enough for most tables.
        counts: occurrences of every token in a text [V], to weigh the rows by.
        padding_idx: a row of zeros, which the unit gives back exactly and does not have to learn; None where the
            model has no padding token, or its row is not zero.
        tied_output: also find the projection of hidden states for an output layer that reads the map table.
        progress: told of every pass over the table.

    Raises:
        CheckpointError: a value of the table is not finite.
    """
    options = options or FitOptions()
    ignored = () if padding_idx is None else (padding_idx,)
    weights = row_weights(table.vocabulary, counts, power=options.power, ignored=ignored)
    found = moments(table, weights, progress)
    goal = Goal(weights, found.variance, options.cosine_weight)
    first = projective(found, shape.map_dim, shape.groups[0] if shape.groups else 1)
    unit = DefineEmbedding(shape, padding_idx=padding_idx)
    baseline = _start(unit, table, goal, first, options.seed, progress)

    def unit_rows(start: int, stop: int, _rows: object) -> Tensor:
        return unit.rows(start, stop)

    start = quality = measure(table, goal, unit_rows, progress)
    errors: tuple[float, ...] = ()
    if options.epochs != 0 and unit.layers:
        output_layer = None
        if tied_output:  # U P^T + a constant row, as the truncated SVD gives it
            output_layer = nn.Linear(len(first.scales), len(first.mean))
            output_layer.weight.data.copy_(torch.from_numpy(first.expansion.T))
            output_layer.bias.data.copy_(torch.from_numpy(first.mean))
        errors = train(unit, table, goal, options, output_layer, progress)
        quality = measure(table, goal, unit_rows, progress)
        if not quality.error <= start.error:
            _start(unit, table, goal, first, options.seed, progress)
            quality = start
    output = None
    if tied_output:
        output = fit_output(table, unit.map.weight.detach().numpy(), weights, progress)
    return DefineFit(unit, quality, baseline, start, errors, output)


def _start(
    unit: DefineEmbedding, table: Table, goal: Goal, first: Projective, seed: int, progress: Progress
) -> Quality:
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

    baseline = measure(table, goal, project, progress, "projecting the table")
    initialise(unit, first, lowest, seed)
    if unit.layers:
        refine_reduction(unit, table, goal.weights, progress)
    return baseline


def fit_output(table: Table, mapped: Array, weights: Array, progress: Progress = silent) -> OutputMap:
    """Weighted least squares for P in E = U P^T + a constant row, from one pass over both tables, in float64.

    Adding one vector to every row of E adds the same number to all logits h E^T = (h P) U^T of a position, which no
    softmax sees. So P is the best projection of the rows without their mean: U P^T is as near to E as it can be up to
    that one vector.

    Args:
        table: E.
        mapped: U [V, n].
        weights: of the rows [V].
        progress: told of the rows.

    Raises:
        CheckpointError: a value of E is not finite.
    """
    map_dim = mapped.shape[1]

    def both(start: int, stop: int) -> Array:
        return np.concatenate([mapped[start:stop], table.rows(start, stop)], axis=1)

    found = moments(Table(table.vocabulary, map_dim + table.model_dim, both), weights, progress)
    own, across = np.split(found.covariance[:map_dim], [map_dim], axis=1)
    variance = float(np.trace(found.covariance[map_dim:, map_dim:]))
    projection = np.linalg.pinv(own, rcond=SMALLEST_DIRECTION, hermitian=True) @ across
    explained = float((2 * projection * across).sum() - ((own @ projection) * projection).sum())
    return OutputMap(projection.T.astype(np.float32), explained / variance if variance > 0 else 1.0)


@torch.no_grad()
def refine_reduction(
    unit: DefineEmbedding, table: Table, weights: Array, progress: Progress = silent
) -> None:
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
    with progress("solving for the reduction", table.vocabulary, "rows") as advance:
        for start, stop, rows in table.chunks():
            mapped = unit.map.weight[start:stop]
            *stages, reconstruction = unit.stages(mapped)
            features = unit.last_inputs(mapped, stages[-1])
            root = torch.from_numpy(weights[start:stop]).sqrt().unsqueeze(1)
            difference = (torch.from_numpy(rows) - reconstruction) * root
            for group, part in enumerate(difference.chunk(groups, dim=1)):
                known = torch.cat([features[:, group], torch.ones(len(rows), 1)], dim=1) * root
                products[group] += (known.T @ known).double()
                missing[group] += (known.T @ part).double()
            advance(stop - start)
    solve = _solve_shared if unit.shape.shared_blocks and groups > 1 else _solve
    added, constants = solve(products, missing)
    if unit.reduce is not None:
        unit.reduce.weight.add_(added[0].T)
        unit.reduce.bias.add_(constants)
    else:
        weight, bias = unit.group_layer(len(unit.layers) - 1)
        weight.add_(added)
        bias.add_(constants)


def _solve(products: Tensor, missing: Tensor) -> tuple[Tensor, Tensor]:
    """[g, w + 1, w + 1] and [g, w + 1, o] -> a block [g, w, o] for each group, and constants [g o]."""
    solutions = torch.stack([_ridge(own, across) for own, across in zip(products, missing, strict=True)])
    return solutions[:, :-1], solutions[:, -1].flatten()


def _solve_shared(products: Tensor, missing: Tensor) -> tuple[Tensor, Tensor]:
    """`_solve` with one block [1, w, o] for all groups: each group's constants are eliminated first."""
    total, means = products[0, -1, -1], products[:, :-1, -1:]
    own = products[:, :-1, :-1] - means @ means.mT / total
    across = missing[:, :-1] - means @ missing[:, -1:] / total
    block = _ridge(own.sum(0), across.sum(0))
    constants = (missing[:, -1] - means.squeeze(-1) @ block) / total
    return block.unsqueeze(0), constants.flatten()


def _ridge(products: Tensor, missing: Tensor) -> Tensor:
    from scipy.linalg import solve

    products.diagonal().add_(RIDGE * products.diagonal().mean())
    solution = solve(products.numpy(), missing.numpy(), assume_a="pos", overwrite_a=True, overwrite_b=True)
    return torch.from_numpy(np.ascontiguousarray(solution))
