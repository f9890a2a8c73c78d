"""Carries out a plan's fits: the unit of the input, the map and projection of the output."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from prunecli.errors import PruneError
from prunecli.methods.embeddings.fit import DefineFit, fit_define
from prunecli.methods.embeddings.plan import EmbeddingPlan
from prunecli.methods.embeddings.projective import moments, projective
from prunecli.methods.embeddings.quality import Goal, Quality, measure
from prunecli.methods.embeddings.source import checkpoint_table, count_tokens, read_unit
from prunecli.methods.embeddings.table import Array, Table, row_weights
from prunecli.methods.embeddings.train import FitOptions
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.define import UnitShape
from prunecli.modules.define import DefineEmbedding
from prunecli.modules.fitting import FREE_SHARE
from prunecli.modules.machine import new_memory
from prunecli.progress import Progress, silent
from prunecli.tensors.quantities import bytes_text


@dataclass(frozen=True)
class OutputMap:
    """The output layer: logits (h P) U^T.

    Attributes:
        projection: P [m, n].
        table: U [V, n], computed from the output table as it is read; None: it is the map table of the input's unit.
        explained_variance: of the rows without their mean.
        quality: of the rows P U^T with their mean; None: not measured.
    """

    projection: NDArray[np.float32]
    table: Table | None
    explained_variance: float
    quality: Quality | None = None


@dataclass(frozen=True)
class Factors:
    """What was fitted, or read.

    Attributes:
        unit: of the input, to be written or cached; None: the input is not touched.
        fit: what the unit is worth; None: it is not new.
        output: None: the output layer is not touched.
    """

    unit: DefineEmbedding | None = None
    fit: DefineFit | None = None
    output: OutputMap | None = None


def fit_embeddings(checkpoint: Checkpoint, plan: EmbeddingPlan, progress: Progress = silent) -> Factors:
    """Fit what `plan_embeddings` chose.

    Raises:
        CheckpointError: a value of a table is not finite, or no tokenizer counts the text.
        PruneError: the fit does not fit in memory.
    """
    tables = plan.tables
    if plan.shape is not None:
        _require_room(checkpoint, plan.shape)
    counts = None
    if plan.text is not None and (plan.shape is not None or plan.output_dim is not None):
        counts = count_tokens(checkpoint, plan.text.texts, tables.vocabulary, progress)
    unit, fit, output = None, None, None
    if plan.shape is not None:
        fit = fit_define(
            checkpoint_table(checkpoint, f"{tables.input}.weight"),
            plan.shape,
            FitOptions(epochs=plan.epochs, seed=plan.seed),
            counts=counts,
            padding_idx=plan.padding_id,
            tied_output=plan.fits_both,
            progress=progress,
        )
        unit = fit.unit
        if fit.output is not None:
            output = OutputMap(fit.output.projection, None, fit.output.explained_variance)
    elif plan.change.input is not None and plan.change.input.cached and tables.unit is not None:
        unit = read_unit(checkpoint, tables)
    if plan.output_dim is not None and output is None:
        source = checkpoint_table(checkpoint, plan.output_table)
        output = _output_map(source, plan.output_dim, counts, plan.padding_id, progress)
    return Factors(unit, fit, output)


def _require_room(checkpoint: Checkpoint, shape: UnitShape) -> None:
    """Refuse a fit that does not fit: the unit, Adam's moments, and matrices of m x m and k x k (see `fit_define`)."""
    unit, moments_size = 4 * shape.parameters, 8 * shape.parameters
    matrices = 8 * (shape.model_dim**2 + shape.features**2)
    needed, free = unit + moments_size + matrices, new_memory(torch.device("cpu"))
    if needed > FREE_SHARE * free:
        raise PruneError(
            f"{checkpoint.path}: the fit needs {bytes_text(needed)} (unit {bytes_text(unit)}, Adam's moments "
            f"{bytes_text(moments_size)}, matrices {bytes_text(matrices)}); {bytes_text(free)} are free, "
            "of which a tenth stays so",
            "Choose a smaller `map_dim` or `expand_dim`, or free some memory.",
        )


def _output_map(
    table: Table,
    map_dim: int,
    counts: NDArray[np.int64] | None,
    padding_id: int | None,
    progress: Progress,
) -> OutputMap:
    """The truncated SVD of the rows without their mean: no map of this n is nearer to them."""
    ignored: tuple[int, ...] = ()
    if padding_id is not None and not table.rows(padding_id, padding_id + 1).any():
        ignored = (padding_id,)
    weights = row_weights(table.vocabulary, counts, power=FitOptions().power, ignored=ignored)
    found = moments(table, weights, progress)
    first = projective(found, map_dim)
    goal = Goal(weights, found.variance, FitOptions().cosine_weight)
    quality = measure(table, goal, lambda _start, _stop, rows: first.expanded(first.mapped(rows)), progress)

    def mapped_rows(start: int, stop: int) -> Array:
        return first.mapped(table.rows(start, stop))

    mapped = Table(table.vocabulary, map_dim, mapped_rows, table.name)
    projection = np.ascontiguousarray(first.expansion.T.astype(np.float32))
    return OutputMap(projection, mapped, quality.explained_variance, quality)
