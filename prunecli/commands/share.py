"""`prunecli share-ffn`, `share-attention`, `factorize-embeddings`: one part for several, narrow tables for wide."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import groupby, islice
from math import prod
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import prunecli
from prunecli.commands import console
from prunecli.commands.checkpoints import with_demo_text
from prunecli.commands.command import check_plot, command, plot_option
from prunecli.commands.rewriting import (
    RewritingOptions,
    ScoredOptions,
    Shown,
    WordsOptions,
    change,
    dense_for_demo,
    output_option,
)
from prunecli.errors import UsageError
from prunecli.methods.embeddings.options import EmbeddingOptions
from prunecli.methods.sharing.options import AttentionOptions, FfnOptions

if TYPE_CHECKING:
    from prunecli.methods.embeddings.plan import Factors
    from prunecli.methods.sharing.plan import Group, SharePlan
    from prunecli.results.rewriting import Factorization, Sharing


class ShareFfn(ScoredOptions, FfnOptions):
    """Options of the command."""

    LEFT_OUT = ("stream", "save_scores")

    output: Path = output_option("shared-ffn")


@command
def share_ffn(options: ShareFfn) -> None:
    """Share or drop feed-forward networks, at any width. Weights are streamed: no model is built.

    Each layer keeps its own norm. Recover the quality with prunecli finetune.
    """
    options = dense_for_demo(with_demo_text(options, options.checkpoint))
    with options.open() as opened:
        plan = prunecli.plan_ffn_on_text(opened, options, options.text_run(measures=False))
        scored = options if plan.decision is not None and options.keep_units != "norms" else None
        if scored is None:
            options.refuse(options.given, "is of no use: no text is read here.")
        _share(opened, options, plan, scored)


def _share(
    opened: prunecli.Checkpoint, options: RewritingOptions, plan: SharePlan, scored: Any = None
) -> None:
    """Carry out a plan, and show the result; `scored` is as in `RewritingOptions.apply`."""
    console.note(*plan.reasons)
    shown = options.apply(opened, prunecli.rewrite_shared(opened, plan), scored)
    options.show(lambda: share_document(shown, plan), share_blocks(shown, plan))


INITS = {"mean": "mean of {}", "first": "the first", "last": "the last", "concat": "{} side by side"}


def share_document(shown: Shown, plan: SharePlan) -> Sharing:
    """The JSON that `--json` prints."""
    from prunecli.results.rewriting import AttentionSharing, FfnSharing, SharedGroup

    parameters, is_ffn = _parameters(shown, plan), plan.options.part == "FFN"
    layers: Mapping[str, Any] = plan.layers
    groups = []
    for group in plan.groups:
        own: dict[str, Any] = {"width": group.width, "scale": group.scale}
        if not is_ffn:
            own = {"heads": [*layers[group.sources[0]].heads]}
        groups.append(
            SharedGroup(
                owner=group.owner,
                members=[*group.members],
                sources=[*group.sources],
                init=group.init or "keep",
                parameters=parameters[group.owner],
                **own,
            )
        )
    kind, more = (FfnSharing, {"sparse": plan.sparse}) if is_ffn else (AttentionSharing, {})
    return shown.document(kind, groups=groups, removed=plan.removed, **more)


def share_blocks(shown: Shown, plan: SharePlan) -> console.Blocks:
    """Yield layers, what their FFN or attention is made of, its hidden units or heads, its parameters; the sizes."""
    from prunecli.model.parts import ranges

    parameters = _parameters(shown, plan)

    def names(parts: Iterable[str]) -> str:
        """`encoder 0-5, cross 0, 3`."""
        runs = groupby((plan.layers[name] for name in parts), key=attrgetter("kind"))
        return ", ".join(f"{kind} {ranges([layer.layer for layer in run])}" for kind, run in runs)

    title, size = ("Feed-forward networks", "width") if plan.options.part == "FFN" else ("Attention", "heads")
    rows, alone = [], []

    def add(parts: Iterable[str], what: str, units: int | None, total: int | None) -> None:
        cells = {
            size: None if units is None else f"{units:,}",
            "parameters": None if total is None else f"{total:,}",
        }
        rows.append({"layers": names(parts), plan.options.part: what, **cells})

    for group in plan.groups:
        if group.is_merged or len(group.members) > 1:
            add(group.members, _made(group), group.width, parameters[group.owner])
        else:
            alone.append(group)
    for (_, width), run in groupby(alone, key=lambda group: (plan.layers[group.owner].kind, group.width)):
        owners = [group.owner for group in run]
        what = "as before" if len(owners) == 1 else "as before, one each"
        add(owners, what, width, sum(map(parameters.__getitem__, owners)))
    if plan.sparse:
        add(plan.sparse, "experts, as before", None, None)
    if plan.removed:
        add(plan.removed, "none", 0, 0)
    yield console.table(title, rows, text_columns=2)
    yield from shown.end_blocks()


def _parameters(shown: Shown, plan: SharePlan) -> dict[str, int]:
    """Owner of a group -> parameters of its FFN or attention."""
    sizes = {output.name: output.info.numel for output in shown.result.rewrite.outputs}
    return {
        group.owner: sum(sizes.get(name, 0) for name in plan.layers[group.owner].tensor_names)
        for group in plan.groups
    }


def _made(group: Group) -> str:
    if group.init is None:
        return "shared, as before"
    if len(group.members) == 1:
        made = "its own"
    elif len(group.sources) == 1 and group.init in ("mean", "concat"):
        made = "the one shared before"
    else:
        made = INITS[group.init].format(len(group.sources))
    if group.width < group.init_width:
        made += f", best {group.width:,} of {group.init_width:,}"
    if group.width > group.init_width:
        made += f", {group.width - group.init_width:,} new"
    return made if group.scale == 1 else f"{made}, x {group.scale:.3g}"


class ShareAttention(RewritingOptions, AttentionOptions):
    """Options of the command."""

    LEFT_OUT = ("stream", "explain")

    output: Path = output_option("shared-attention")


@command
def share_attention(options: ShareAttention) -> None:
    """Share or drop self- and cross-attention. Weights are streamed: no model is built.

    Each layer keeps its own norms and its own part of the cache. The result loses more quality than one with shared
    FFNs. Recover the quality with prunecli finetune.
    """
    with options.open() as opened:
        _share(opened, options, prunecli.plan_attention(opened, options))


class FactorizeEmbeddings(RewritingOptions, WordsOptions, EmbeddingOptions):
    """Options of the command."""

    LEFT_OUT = ("stream", "check_text", "explain")

    output: Path = output_option("factorised-embeddings")
    plot: Path | None = plot_option(
        "Draw the correlations of the embedding's dimensions, by layers and groups too (Figures 7 to 11)"
    )


@command
def factorize_embeddings(options: FactorizeEmbeddings) -> None:
    """Replace embedding tables by narrower ones and a unit that is fitted to compute the original rows from theirs.

    A token's row of width n is expanded by group transformations to k and reduced to the model's width. If input and
    output share a table, they go on sharing one: hidden states are projected to n in the output layer. Recover the
    quality with prunecli finetune --teacher.
    """
    from prunecli.methods.embeddings.plan import Factors, embedding_shapes

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
        made = factors or Factors()
        options.show(
            lambda: _document(shown, plan, made, before, after), _blocks(shown, made, change(before, after))
        )


def _document(
    shown: Shown, plan: prunecli.EmbeddingPlan, factors: Factors, before: int, after: int
) -> Factorization:
    from prunecli.results.rewriting import Factorization, TableQuality, UnitFit

    fits: dict[str, TableQuality] = {}
    if (fit := factors.fit) is not None:
        fits["input"] = UnitFit(
            **fit.quality.to_json(),
            unit_parameters=fit.unit.shape.parameters,
            table_parameters=fit.unit.shape.table_parameters,
            projective=fit.baseline,
            errors=[*fit.errors],
        )
    if factors.output is not None:
        fits["output_layer"] = factors.output.quality
    return shown.document(
        Factorization,
        embedding=plan.change.to_json(),
        embedding_parameters_before=before,
        embedding_parameters_after=after,
        **fits,
    )


def _blocks(shown: Shown, factors: Factors, own: Mapping[str, str]) -> console.Blocks:
    """Yield the parameters of the embeddings, `own`, and those of the model; how near the rows come; the place."""
    yield console.table("Embeddings", [{"": "embedding parameters", **own}, *shown.rows()])
    rows = []
    if (fit := factors.fit) is not None:
        shape = fit.unit.shape
        rows.append({"name": f"input, {shape.kind}", **vars(fit.quality), "parameters": fit.parameters_after})
        if shape.kind != "projective":
            name = f"input, projective with the same n = {shape.map_dim}"
            rows.append({"name": name, **vars(fit.baseline), "parameters": fit.baseline_parameters})
    if (output := factors.output) is not None:
        of = "the input's" if output.quality.mean_cosine is None else "its own"
        rows.append({"name": f"output, through {of} map table", **vars(output.quality)})
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
    from prunecli.methods.embeddings.table import checkpoint_table, moments, projective, row_weights
    from prunecli.report.pictures import correlation_map, correlation_maps, group_correlations
    from prunecli.report.render import save_pictures
    from prunecli.tensors.hub.names import origin

    assert factors.unit is not None
    unit = factors.unit
    table = checkpoint_table(checkpoint, f"{plan.tables.input}.weight")
    kind = unit.shape.kind
    maps = {"original": correlation_map(rows for _, _, rows in table.chunks())}
    if kind != "projective":
        best = projective(*moments(replace(table, weights=row_weights(table.vocabulary))), unit.shape.map_dim)
        fitted = (best.mapped(rows) @ best.expansion + best.mean for _, _, rows in table.chunks())
        maps["projective"] = correlation_map(fitted)
    maps[kind] = correlation_map(rows.numpy() for rows in unit.expanded())
    title = f"{origin(checkpoint.path)['path']}, n = {unit.shape.map_dim}"
    layers, groups, mapped = {}, {}, unit.map.weight.detach()
    expansions = [f"expansion layer {number}" for number in range(1, len(unit.shape.layers) + 1)]
    stages = ["map layer", *expansions, *(["reduction"] if unit.shape.reduction else [])]
    for number, name in enumerate(stages):
        layers[name] = correlation_map(
            next(islice(unit.stages(mapped[start : start + CHUNK_ROWS]), number, None)).detach().numpy()
            for start in range(0, len(mapped), CHUNK_ROWS)
        )
        count = unit.shape.groups[number - 1] if 0 < number <= len(unit.shape.groups) else 1
        if count > 1:
            groups[f"{count} groups of {name}"] = group_correlations(layers[name], count)
    save_pictures(correlation_maps([maps, layers, groups]), path, title)
