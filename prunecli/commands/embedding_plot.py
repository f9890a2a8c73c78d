"""Correlation maps of an embedding table, its projective embedding, its unit, and the unit's layers and groups."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from prunecli.errors import UsageError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from prunecli.methods.embeddings.factorize import Factors
    from prunecli.methods.embeddings.plan import EmbeddingPlan
    from prunecli.methods.embeddings.table import Table
    from prunecli.model.checkpoint import Checkpoint
    from prunecli.model.define import UnitShape
    from prunecli.modules.define import DefineEmbedding
    from prunecli.progress import Progress

CHUNK_ROWS = 4096
"""Rows of the table that go through the unit at a time."""


def require_unit(plan: EmbeddingPlan) -> None:
    """Refuse a picture of nothing, before any work is done.

    Raises:
        UsageError: no unit is fitted.
    """
    if plan.shape is None:
        raise UsageError(
            "--plot draws the unit of the input side", "Choose --side input or both, without a unit."
        )


def draw(
    checkpoint: Checkpoint, plan: EmbeddingPlan, factors: Factors, path: Path, progress: Progress
) -> None:
    """Write the PNG: the original table, the best projective embedding of the same n, the unit; its layers; groups.

    What a layer gives is taken after its GELU.
    """
    from prunecli.analysis.correlation import correlation_map, group_correlations
    from prunecli.methods.embeddings.source import checkpoint_table
    from prunecli.report.pictures import correlation_maps
    from prunecli.report.render import save_pictures
    from prunecli.tensors.hub.names import origin

    assert factors.unit is not None
    unit = factors.unit
    table = checkpoint_table(checkpoint, f"{plan.tables.input}.weight")
    kind = unit.shape.kind
    maps = {"original": correlation_map(rows for _, _, rows in table.chunks())}
    if kind != "projective":
        maps["projective"] = correlation_map(_projective_rows(table, unit.shape.map_dim, progress))
    maps[kind] = correlation_map(rows.numpy() for rows in unit.expanded())
    title = f"{origin(checkpoint.path)['path']}, n = {unit.shape.map_dim}"
    layers, groups = {}, {}
    for number, name in enumerate(_stage_names(unit.shape)):
        layers[name] = correlation_map(_stage(unit, number))
        count = unit.shape.groups[number - 1] if 0 < number <= len(unit.shape.groups) else 1
        if count > 1:
            groups[f"{count} groups of {name}"] = group_correlations(layers[name], count)
    save_pictures(correlation_maps([maps, layers, groups]), path, title)


def _stage_names(shape: UnitShape) -> list[str]:
    expansions = [f"expansion layer {number}" for number in range(1, len(shape.layers) + 1)]
    return ["map layer", *expansions, *(["reduction"] if shape.reduction else [])]


def _stage(unit: DefineEmbedding, number: int) -> Iterator[NDArray[np.floating]]:
    """What a stage of the unit makes of every token [rows, width]."""
    for start in range(0, unit.num_embeddings, CHUNK_ROWS):
        mapped = unit.map.weight.detach()[start : start + CHUNK_ROWS]
        yield next(islice(unit.stages(mapped), number, None)).detach().numpy()


def _projective_rows(table: Table, map_dim: int, progress: Progress) -> Iterator[NDArray[np.floating]]:
    from prunecli.methods.embeddings.projective import moments, projective
    from prunecli.methods.embeddings.table import row_weights

    first = projective(moments(table, row_weights(table.vocabulary), progress), map_dim)
    for _, _, rows in table.chunks():
        yield first.mapped(rows) @ first.expansion + first.mean
