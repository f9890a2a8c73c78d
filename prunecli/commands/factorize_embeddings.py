"""`prunecli factorize-embeddings`: a narrow table and a DeFINE unit in the place of an embedding table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from itertools import islice
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import prunecli
from prunecli.commands import console
from prunecli.commands.command import check_plot, command, plot_option
from prunecli.commands.rewriting import RewritingOptions, Shown, WordsOptions, change, output_option
from prunecli.errors import UsageError
from prunecli.methods.embeddings.options import EmbeddingOptions

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from prunecli.methods.embeddings.plan import Factors
    from prunecli.methods.embeddings.table import Table
    from prunecli.modules.define import DefineEmbedding
    from prunecli.results.rewriting import Factorization


class FactorizeEmbeddings(RewritingOptions, WordsOptions, EmbeddingOptions):
    """Options of the command."""

    LEFT_OUT = frozenset({"stream", "check_text", "explain"})

    output: Path = output_option("factorised-embeddings")
    plot: Path | None = plot_option(
        "Draw the correlations of the embedding's dimensions, by layers and groups too (Figures 7 to 11)"
    )


@command(FactorizeEmbeddings)
def factorize_embeddings(options: FactorizeEmbeddings) -> None:
    """Replace embedding tables by narrower ones and a unit that is fitted to compute the original rows from theirs.

    A token's row of width n is expanded by group transformations to k and reduced to the model's width. If input and
    output share a table, they go on sharing one: hidden states are projected to n in the output layer. Recover the
    quality with prunecli finetune --teacher.
    """
    from prunecli.methods.embeddings.plan import embedding_shapes

    plot = options.plot
    if plot is not None:
        check_plot(plot, force=options.force or options.dry_run)
    with options.open() as opened:
        opened.require_architecture()
        plan = prunecli.plan_embeddings(opened, options, options.lines())
        if plot is not None and plan.shape is None:
            raise UsageError(
                "`plot` draws the unit of the input side", "Choose `side=input` or both, without a unit."
            )
        console.note(*plan.reasons)
        changes = opened.structure.embedding, plan.change
        before, after = (sum(map(prod, embedding_shapes(opened, one).values())) for one in changes)
        if after > before and (plan.shape, plan.output_dim) != (None, None):  # not of `cache` alone
            console.warn(
                f"Warning: the embeddings grow, {before:,} -> {after:,} parameters ({after / before:.1%}).\n"
                "Choose a smaller `expand_dim` or `map_dim`, or `kind=projective`; `cache` can be given later, for "
                "the result."
            )
        is_fitted = not (options.dry_run or options.config_only)
        factors = prunecli.fit_embeddings(opened, plan, console.progress()) if is_fitted else None
        shown = options.apply(opened, prunecli.rewrite_embeddings(opened, plan, factors))
        if plot is not None and factors is not None:
            draw(opened, plan, factors, plot)
        options.show(
            lambda: _document(shown, plan, factors, before, after),
            _blocks(shown, factors, change(before, after)),
        )


def _document(
    shown: Shown, plan: prunecli.EmbeddingPlan, factors: Factors | None, before: int, after: int
) -> Factorization:
    from prunecli.results.rewriting import Factorization, TableQuality, UnitFit

    fits: dict[str, TableQuality] = {}
    if factors is not None and (fit := factors.fit) is not None:
        fits["input"] = UnitFit(
            **TableQuality.model_validate(fit.quality).to_json(),
            unit_parameters=fit.unit.shape.parameters,
            table_parameters=fit.unit.shape.table_parameters,
            projective=TableQuality.model_validate(fit.baseline),
            errors=[*fit.errors],
        )
    if factors is not None and (output := factors.output) is not None:
        cosine = {} if output.quality is None else {"mean_cosine": output.quality.mean_cosine}
        fits["output_layer"] = TableQuality(explained_variance=output.explained_variance, **cosine)
    return shown.document(
        Factorization,
        plan.options.seed,
        embedding=plan.change.to_json(),
        embedding_parameters_before=before,
        embedding_parameters_after=after,
        **fits,
    )


def _blocks(shown: Shown, factors: Factors | None, own: Mapping[str, str]) -> Iterator[Any]:
    """Yield the parameters of the embeddings, `own`, and those of the model; how near the rows come; the place."""
    yield console.table("Embeddings", [{"": "embedding parameters", **own}, *shown.rows()])
    rows = []
    if factors is not None and (fit := factors.fit) is not None:
        shape = fit.unit.shape
        rows.append(
            {"name": f"input, {shape.kind}", **asdict(fit.quality), "parameters": fit.parameters_after}
        )
        if shape.kind != "projective":
            name = f"input, projective with the same n = {shape.map_dim}"
            rows.append({"name": name, **asdict(fit.baseline), "parameters": fit.baseline_parameters})
    if factors is not None and (output := factors.output) is not None:
        of = "the input's map table" if output.table is None else "its own map table"
        name, quality = f"output, through {of}", output.quality
        rows.append(
            {
                "name": name,
                "explained_variance": output.explained_variance,
                "mean_cosine": quality and quality.mean_cosine,
            }
        )
    columns = {
        "": "{name}",
        "explained variance": "{explained_variance:.2%}",
        "mean cosine": "{mean_cosine:.4f}",
        "parameters": "{parameters:,}",
    }
    yield console.table("How near the rows come", rows, columns)
    yield from shown.place_blocks(dry="nothing is fitted or written")


CHUNK_ROWS = 4096
"""Rows of the table that go through the unit at a time."""


def draw(checkpoint: prunecli.Checkpoint, plan: prunecli.EmbeddingPlan, factors: Factors, path: Path) -> None:
    """Write the PNG: the original table, the best projective embedding of the same n, the unit; its layers; groups.

    What a layer gives is taken after its GELU.
    """
    from prunecli.methods.embeddings.table import checkpoint_table
    from prunecli.report.pictures import correlation_map, correlation_maps, group_correlations
    from prunecli.report.render import save_pictures
    from prunecli.tensors.hub.names import origin

    assert factors.unit is not None
    unit = factors.unit
    table = checkpoint_table(checkpoint, f"{plan.tables.input}.weight")
    kind = unit.shape.kind
    maps = {"original": correlation_map(rows for _, _, rows in table.chunks())}
    if kind != "projective":
        maps["projective"] = correlation_map(_projective_rows(table, unit.shape.map_dim))
    maps[kind] = correlation_map(rows.numpy() for rows in unit.expanded())
    title = f"{origin(checkpoint.path)['path']}, n = {unit.shape.map_dim}"
    layers, groups = {}, {}
    expansions = [f"expansion layer {number}" for number in range(1, len(unit.shape.layers) + 1)]
    stages = ["map layer", *expansions, *(["reduction"] if unit.shape.reduction else [])]
    for number, name in enumerate(stages):
        layers[name] = correlation_map(_stage(unit, number))
        count = unit.shape.groups[number - 1] if 0 < number <= len(unit.shape.groups) else 1
        if count > 1:
            groups[f"{count} groups of {name}"] = group_correlations(layers[name], count)
    save_pictures(correlation_maps([maps, layers, groups]), path, title)


def _stage(unit: DefineEmbedding, number: int) -> Iterator[NDArray[np.floating]]:
    """Yield the outputs of a stage of the unit for all tokens `[rows, width]`."""
    for start in range(0, unit.num_embeddings, CHUNK_ROWS):
        mapped = unit.map.weight.detach()[start : start + CHUNK_ROWS]
        yield next(islice(unit.stages(mapped), number, None)).detach().numpy()


def _projective_rows(table: Table, map_dim: int) -> Iterator[NDArray[np.floating]]:
    from prunecli.methods.embeddings.table import moments, projective, row_weights

    first = projective(moments(replace(table, weights=row_weights(table.vocabulary))), map_dim)
    for _, _, rows in table.chunks():
        yield first.mapped(rows) @ first.expansion + first.mean
