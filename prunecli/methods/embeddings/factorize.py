"""Carries out a plan's fits: the unit of the input, the map and projection of the output."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from prunecli.errors import PruneError
from prunecli.methods.embeddings.fit import DefineFit, FitOptions, OutputMap, fit_define
from prunecli.methods.embeddings.plan import EmbeddingPlan
from prunecli.methods.embeddings.table import checkpoint_table, count_tokens
from prunecli.model.changes import EmbeddingChange
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.define import UnitShape
from prunecli.model.rewrite import Rewrite, replacing, rewritten
from prunecli.modules.classes import model_class, own_config
from prunecli.modules.define import DefineEmbedding, padding_id
from prunecli.modules.fitting import FREE_SHARE
from prunecli.modules.machine import new_memory
from prunecli.progress import Progress, silent
from prunecli.tensors.quantities import bytes_text
from prunecli.tensors.stream import Copy, Generated, Output, given, zeros


@dataclass(frozen=True)
class Factors:
    """Weights that were fitted or read.

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
        CheckpointError: weights of other shapes than config.json says, a value of a table that is not finite, or no
            tokenizer counts the text.
        PruneError: the fit does not fit in memory.
    """
    checkpoint.check()
    tables = plan.tables
    if plan.shape is not None:
        # The unit, Adam's moments, and matrices of m x m and k x k (see `fit_define`).
        unit_bytes, moment_bytes = 4 * plan.shape.parameters, 8 * plan.shape.parameters
        matrices = 8 * (plan.shape.model_dim**2 + 2 * plan.shape.features**2)
        needed, free = unit_bytes + moment_bytes + matrices, new_memory(torch.device("cpu"))
        if needed > FREE_SHARE * free:
            raise PruneError(
                f"{checkpoint.path}: the fit needs {bytes_text(needed)} (unit {bytes_text(unit_bytes)}, Adam's moments "
                f"{bytes_text(moment_bytes)}, matrices {bytes_text(matrices)}); {bytes_text(free)} are free, "
                "a tenth of it a reserve",
                "Choose a smaller `map_dim` or `expand_dim`, or free some memory.",
            )
    counts = None
    if plan.text is not None and (plan.shape is not None or plan.output_dim is not None):
        counts = count_tokens(checkpoint, plan.text.texts, tables.vocabulary, progress)
    unit, fit, output = None, None, None
    if plan.shape is not None:
        fit = fit_define(
            checkpoint_table(checkpoint, f"{tables.input}.weight", progress),
            plan.shape,
            FitOptions(epochs=plan.options.epochs, seed=plan.options.seed),
            counts=counts,
            padding_idx=plan.padding_id,
            tied_output=plan.output_dim is not None and plan.is_tied,
        )
        unit, output = fit.unit, fit.output
    elif plan.change.input is not None and plan.change.input.cached and tables.unit is not None:
        padding = padding_id(own_config(checkpoint, model_class(checkpoint)), tables)
        unit = DefineEmbedding(tables.unit, padding_idx=padding)  # without the factor of its rows
        with torch.no_grad():
            for name, place in unit.named_parameters():
                values = checkpoint.read(f"{tables.input}.{name}").astype(np.float32)
                place.copy_(torch.from_numpy(values))
    if plan.output_dim is not None and output is None:
        # No map of this n is nearer to the rows of the output table, without their mean, than its projective embedding.
        table = f"{tables.input if plan.is_tied else tables.output}.weight"
        source, padding = checkpoint_table(checkpoint, table, progress), plan.padding_id
        if padding is not None and source.rows(padding, padding + 1).any():
            padding = None
        projective = UnitShape(source.vocabulary, plan.output_dim, source.model_dim, kind="projective")
        alone = fit_define(source, projective, counts=counts, padding_idx=padding, tied_output=True)
        assert alone.output is not None
        fitted = alone.unit.map.weight.detach().numpy()
        output = replace(alone.output, table=fitted, quality=alone.quality)
    return Factors(unit, fit, output)


Shape = tuple[int, ...]


def rewrite_embeddings(checkpoint: Checkpoint, plan: EmbeddingPlan, factors: Factors | None) -> Rewrite:
    """The checkpoint with its embeddings as planned, its tensors in the order of the source.

    Args:
        checkpoint: the source.
        plan: for this checkpoint.
        factors: what was fitted for it; None: zeros in their place, for a dry run.

    Raises:
        UnsupportedModelError, UsageError: as `rewritten`.
    """
    structure = replace(checkpoint.structure, embedding=plan.change)
    shapes = embedding_shapes(checkpoint, plan.change)
    source, output = plan.tables.input, f"{plan.tables.output}.weight"
    fitted = {}  # also what is computed from the unit
    if factors is not None and (unit := factors.unit) is not None:
        if plan.change.unit is None:
            rows = (unit.num_embeddings, unit.embedding_dim)
            fitted[f"{source}.weight"] = Generated(
                rows, lambda start, stop: np.asarray(unit.rows(start, stop))
            )
        else:
            for part, held in unit.named_parameters():
                fitted[f"{source}.{part}"] = given(held.detach().numpy())
    if factors is not None and factors.output is not None:
        fitted[f"{plan.tables.output}.project.weight"] = given(factors.output.projection.T)
        mapped = factors.output.table
        if mapped is None and factors.unit is not None:
            mapped = factors.unit.map.weight.detach().numpy()
        if mapped is not None:
            fitted[output] = given(mapped)
    table = f"{source}.weight" if plan.tables.unit is None else f"{source}.map.weight"
    gone = {*embedding_shapes(checkpoint, checkpoint.structure.embedding), *shapes}
    first = next(name for name in checkpoint.tensors if name in gone)
    made = []
    for name, shape in shapes.items():
        # Where the two part, the output layer takes a copy of the input's table along.
        stored = checkpoint.tensors.get(table if plan.is_tied and name == output else name)
        if name in fitted or stored is None or stored.shape != shape:
            expression = fitted.get(name, zeros(shape))
            made.append(Output(name, checkpoint.info(first).dtype, shape, expression))
        else:
            made.append(Output(name, stored.dtype, shape, Copy(stored.name)))
    outputs = [*replacing(checkpoint, {**dict.fromkeys(gone, ()), first: made})]
    # `tie_word_embeddings` false, which says that the tables are apart, parts a bias from what it was tied to, too.
    family, change = checkpoint.require_architecture(), plan.change.output
    is_whole = plan.is_tied and change is not None and change.map_dim is None
    if is_whole and family.embedding is not None and family.embedding.apart:
        for alias, name in family.tied.items():
            is_held = name in checkpoint.tensors and alias not in checkpoint.tensors
            if alias in family.loose and alias != output and is_held:
                info = checkpoint.info(name)
                outputs.append(Output(alias, info.dtype, info.shape, Copy(name)))
    return rewritten(checkpoint, structure, outputs, plan.step, dtype=plan.options.dtype)


def embedding_shapes(checkpoint: Checkpoint, change: EmbeddingChange) -> dict[str, Shape]:
    """Name -> shape of every tensor of the token embeddings, with `change` in the place of what the source says.

    A stock output table counts where it is one of its own.
    """
    structure = replace(checkpoint.structure, embedding=change)
    found = checkpoint.layout.changed(structure).require_tables()
    shapes: dict[str, Shape] = {}
    if found.unit is None:
        shapes[f"{found.input}.weight"] = (found.vocabulary, found.model_dim)
    output = f"{found.output}.weight"
    if change.output is None and output in checkpoint.tensors:
        shapes[output] = checkpoint.info(output).shape
    return shapes | found.tensors
