"""Fit a DeFINE unit to a pretrained table: least reconstruction error of its rows, from the truncated SVD onwards."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from prunecli.methods.embeddings.initialise import initialise
from prunecli.methods.embeddings.output import OutputFit, fit_output
from prunecli.methods.embeddings.projective import Projective, moments, projective
from prunecli.methods.embeddings.quality import Goal, Quality, measure
from prunecli.methods.embeddings.refine import refine_reduction
from prunecli.methods.embeddings.table import Table, row_weights
from prunecli.methods.embeddings.train import FitOptions, train
from prunecli.model.define import UnitShape
from prunecli.modules.define import DefineEmbedding
from prunecli.progress import Progress, silent


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
    output: OutputFit | None

    @property
    def parameters_before(self) -> int:
        """Of the table."""
        return self.unit.shape.table_parameters

    @property
    def parameters_after(self) -> int:
        """Of the unit: map table, layers, reduction; and of the output's projection, where there is one."""
        shape = self.unit.shape
        return shape.parameters + (shape.output_parameters if self.output is not None else 0)

    @property
    def baseline_parameters(self) -> int:
        """The same for the projective embedding."""
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
        output_layer = _output_layer(first) if tied_output else None
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


def _output_layer(first: Projective) -> nn.Linear:
    """U P^T + a constant row, as the truncated SVD gives it."""
    layer = nn.Linear(len(first.scales), len(first.mean))
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(first.expansion.T))
        layer.bias.copy_(torch.from_numpy(first.mean))
    return layer
