"""What each tensor of the factorised checkpoint is made of."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from prunecli.methods.embeddings.factorize import Factors
from prunecli.methods.embeddings.plan import EmbeddingPlan
from prunecli.model.changes import EmbeddingChange
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.rewrite import Rewrite, rewritten
from prunecli.tensors.dtypes import parse_dtype
from prunecli.tensors.stream import Copy, Expression, Generated, Output, Zeros

Shape = tuple[int, ...]


def rewrite_embeddings(
    checkpoint: Checkpoint, plan: EmbeddingPlan, factors: Factors | None = None
) -> Rewrite:
    """The checkpoint with its embeddings as planned, its tensors in the order of the source.

    Args:
        checkpoint: the source.
        plan: for this checkpoint.
        factors: what was fitted for it; None: zeros in their place, for a dry run.

    Raises:
        UnsupportedModelError, UsageError: as `rewritten`.
    """
    target = None if plan.dtype is None else parse_dtype(plan.dtype)
    structure = replace(checkpoint.structure, embedding=plan.change)
    shapes = embedding_shapes(checkpoint, plan.change)
    expressions = _expressions(checkpoint, plan, factors)
    gone = {*embedding_shapes(checkpoint, checkpoint.structure.embedding), *shapes}
    stored = next(info.dtype for name, info in checkpoint.tensors.items() if name in gone)
    made = []
    for name, shape in shapes.items():
        expression = expressions.get(name, Zeros(shape))
        kind = checkpoint.info(expression.source).dtype if isinstance(expression, Copy) else stored
        made.append(Output(name, target or kind, shape, expression))
    outputs: list[Output] = []
    for name, info in checkpoint.tensors.items():
        if name in gone:
            outputs += made
            made = []
            continue
        outputs.append(Output(name, info.cast(target).dtype, info.shape, Copy(name)))
    outputs += [
        Output(alias, target or checkpoint.info(name).dtype, checkpoint.info(name).shape, Copy(name))
        for alias, name in _untied_beside(checkpoint, plan).items()
    ]
    return rewritten(checkpoint, structure, tuple(outputs), plan.step)


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


def _expressions(
    checkpoint: Checkpoint, plan: EmbeddingPlan, factors: Factors | None
) -> dict[str, Expression]:
    """Those that are known; without `factors` only what is copied."""
    source, output = plan.tables.input, plan.tables.output
    found: dict[str, Expression] = {
        name: Copy(name)
        for name in embedding_shapes(checkpoint, checkpoint.structure.embedding)
        if name in checkpoint.tensors
    }
    table = f"{source}.weight" if plan.tables.unit is None else f"{source}.map.weight"
    if plan.is_tied:  # where the two part, the output layer takes a copy along
        found[f"{output}.weight"] = Copy(table)
    is_cached = plan.change.input is not None and plan.change.input.cached
    if plan.shape is not None or (is_cached and plan.tables.unit is not None):
        for name in [name for name in found if name.startswith(f"{source}.")]:
            del found[name]
    if plan.output_dim is not None:
        found.pop(f"{output}.weight", None)
    if factors is None:
        return found
    if (unit := factors.unit) is not None and is_cached:
        shape = (unit.num_embeddings, unit.embedding_dim)
        found[f"{source}.weight"] = Generated(shape, lambda start, stop: np.asarray(unit.rows(start, stop)))
    elif unit is not None:
        for part, held in unit.named_parameters():
            found[f"{source}.{part}"] = _given(held.detach().numpy())
    if factors.output is not None:
        found[f"{output}.project.weight"] = _given(factors.output.projection.T)
        if (mapped := factors.output.table) is not None:
            found[f"{output}.weight"] = Generated((mapped.vocabulary, mapped.model_dim), mapped.rows)
        elif unit is not None:
            found[f"{output}.weight"] = _given(unit.map.weight.detach().numpy())
    return found


def _given(values: NDArray[np.float32]) -> Generated:
    return Generated(values.shape, lambda start, stop: values[start:stop])


def _untied_beside(checkpoint: Checkpoint, plan: EmbeddingPlan) -> dict[str, str]:
    """Aliases that become tensors of their own together with the output table: a bias -> what it was tied to.

    `tie_word_embeddings` false, which says that the tables are apart, parts these too.
    """
    family, output = checkpoint.require_architecture(), plan.change.output
    if not plan.is_tied or output is None or output.map_dim is not None:
        return {}
    if family.embedding is None or not family.embedding.apart:
        return {}
    return {
        alias: name
        for alias, name in family.tied.items()
        if alias in family.loose
        and alias != f"{plan.tables.output}.weight"
        and alias not in checkpoint.tensors
        and name in checkpoint.tensors
    }
