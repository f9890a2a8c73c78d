"""`prunecli factorize-embeddings`: a narrow table and a DeFINE unit in the place of an embedding table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from prunecli.commands import console
from prunecli.commands.groups import Without, flattened
from prunecli.commands.options import (
    CheckpointArgument,
    DataOption,
    DtypeOption,
    SeedOption,
    TextFilesOption,
)
from prunecli.commands.outputs import check_plot
from prunecli.commands.rewriting import How, Shown, change
from prunecli.model.define import UnitKind

if TYPE_CHECKING:
    from prunecli.methods.embeddings.factorize import Factors
    from prunecli.methods.embeddings.plan import EmbeddingPlan
    from prunecli.methods.embeddings.quality import Quality as RowQuality
    from prunecli.model.checkpoint import Checkpoint
    from prunecli.results.rewriting import Factorization

SideName = Literal["input", "output", "both"]


@flattened
def factorize_embeddings(
    checkpoint: CheckpointArgument = None,
    map_dim: Annotated[
        int | None,
        typer.Option(
            help="Width n of the table that is left. Default: about an eighth of the model's width.",
        ),
    ] = None,
    expand_dim: Annotated[
        int | None,
        typer.Option(
            metavar="K",
            help="Width k that its rows are expanded to. Default: about twice the model's width.",
        ),
    ] = None,
    depth: Annotated[
        int | None,
        typer.Option(metavar="L", help="Expansion layers. Default: 3."),
    ] = None,
    max_groups: Annotated[
        int | None,
        typer.Option(
            metavar="G",
            help="Groups of the first layer; each further one has half as many. Default: 4.",
        ),
    ] = None,
    kind: Annotated[
        UnitKind | None,
        typer.Option(
            help="define, one of the paper's ablations of it, or projective: no expansion at all. Default: define.",
        ),
    ] = None,
    shared_blocks: Annotated[
        bool,
        typer.Option(
            "--shared-blocks",
            help="One block of weights for all groups of a layer, as the paper's A.1 has it; else one for each group.",
        ),
    ] = False,
    no_reduction: Annotated[
        bool,
        typer.Option(
            "--no-reduction",
            help="No linear layer from k to the model's width: the last expansion layer makes the row (Table 8b).",
        ),
    ] = False,
    side: Annotated[
        SideName | None,
        typer.Option(
            help="Which tables. Default: both where input and output share one (one side alone then saves nothing), "
            "else the input's.",
        ),
    ] = None,
    cache: Annotated[
        bool,
        typer.Option(
            "--cache",
            help="Write the rows that the unit makes as an ordinary table, so that inference skips it; of a checkpoint "
            "that is factorised already nothing is fitted.",
        ),
    ] = False,
    data: DataOption = None,
    split: Annotated[
        str | None,
        typer.Option(
            metavar="A,B",
            help="Splits of --data whose tokens are counted. Default: train, val and dev, those that there are.",
        ),
    ] = None,
    langs: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="Languages of --data; default: all."),
    ] = None,
    text: TextFilesOption = None,
    epochs: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Passes over the table at most; 0: the projective embedding as a unit. Default: as many as make a "
            "million rows, 4 to 60.",
        ),
    ] = None,
    dtype: DtypeOption = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.png",
            help="Draw the correlations of the embedding's dimensions, by layers and groups too (Figures 7 to 11).",
        ),
    ] = None,
    seed: SeedOption = 0,
    how: Annotated[How, Without({"check", "explain"})] = How(Path("factorised-embeddings")),
) -> None:
    """Replace embedding tables by narrower ones and a unit that is fitted to make the original rows of theirs.

    A token's row of width n is expanded by group transformations to k and reduced to the model's width. Where input
    and output share a table they go on sharing one: hidden states are projected to n in the output layer. Afterwards,
    finetune --teacher recovers the quality.
    """
    from prunecli.commands.embedding_plot import draw, require_unit
    from prunecli.methods.embeddings.dimensions import EmbeddingOptions
    from prunecli.methods.embeddings.factorize import fit_embeddings
    from prunecli.methods.embeddings.plan import plan_embeddings
    from prunecli.methods.embeddings.rewrite import rewrite_embeddings
    from prunecli.text.choice import TextChoice

    options = EmbeddingOptions(
        side=side,
        map_dim=map_dim,
        expand_dim=expand_dim,
        depth=depth,
        max_groups=max_groups,
        kind=kind,
        shared_blocks=shared_blocks,
        reduction=not no_reduction,
        cache=cache,
        epochs=epochs,
        dtype=dtype,
        seed=seed,
    )
    if plot is not None:
        check_plot(plot, force=how.force or how.dry_run)
    with how.open(checkpoint) as opened:
        how.refuse(opened)
        lines = TextChoice(data=data, split=split, langs=langs, files=tuple(text or ())).lines()
        plan = plan_embeddings(opened, options, lines)
        if plot is not None:
            require_unit(plan)
        how.note(*plan.reasons)
        if (warning := _growth(opened, plan)) is not None:
            console.warn(warning)
        is_fitted = not (how.dry_run or how.config_only)
        factors = fit_embeddings(opened, plan, how.progress) if is_fitted else None
        shown = how.apply(opened, rewrite_embeddings(opened, plan, factors))
        if plot is not None and factors is not None:
            draw(opened, plan, factors, plot, how.progress)
        how.show(lambda: _document(shown, plan, factors), lambda: _show(shown, plan, factors))


def _embedding_parameters(checkpoint: Checkpoint, plan: EmbeddingPlan) -> tuple[int, int]:
    """Of everything that is the token embeddings', before and after."""
    from math import prod

    from prunecli.methods.embeddings.rewrite import embedding_shapes

    before, after = (
        sum(map(prod, embedding_shapes(checkpoint, change).values()))
        for change in (checkpoint.structure.embedding, plan.change)
    )
    return before, after


def _growth(checkpoint: Checkpoint, plan: EmbeddingPlan) -> str | None:
    """A warning where the embeddings take more room afterwards; None where they do not, or only --cache is asked."""
    before, after = _embedding_parameters(checkpoint, plan)
    both = plan.shape is not None and plan.output_dim is not None
    if after <= before or (plan.shape is None and plan.output_dim is None):
        return None
    if plan.is_tied and not both:
        asked, other = ("input", "output") if plan.output_dim is None else ("output", "input")
        why = f"input and output share a table, and --side {asked} stores the {other}'s apart"
        remedy = "--side both keeps one table for both."
    elif plan.change.input is not None and plan.change.input.cached:
        why = "--cache writes the rows down beside all that is left"
        remedy = "Leave out --cache for a small file; it can be given later, for the result."
    else:
        why = "the unit is larger than what it saves"
        remedy = "Choose a smaller --expand-dim or --map-dim, or --kind projective."
    grown = f"{before:,} -> {after:,} parameters ({after / before:.1%})"
    return f"Warning: the embeddings grow, {grown}: {why}.\n{remedy}"


def _document(shown: Shown, plan: EmbeddingPlan, factors: Factors | None) -> Factorization:
    from prunecli.results.rewriting import Factorization, Quality, UnitFit

    before, after = _embedding_parameters(shown.result.source, plan)
    fits: dict[str, Quality] = {}
    if factors is not None and (fit := factors.fit) is not None:
        fits["input"] = UnitFit(
            **_quality(fit.quality),
            unit_parameters=fit.unit.shape.parameters,
            table_parameters=fit.parameters_before,
            projective=Quality(**_quality(fit.baseline)),
            errors=[*fit.errors],
        )
    if factors is not None and (output := factors.output) is not None:
        cosine = {} if output.quality is None else {"mean_cosine": output.quality.mean_cosine}
        fits["output_layer"] = Quality(explained_variance=output.explained_variance, **cosine)
    return shown.document(
        Factorization,
        plan.seed,
        embedding=plan.change.to_json(),
        embedding_parameters_before=before,
        embedding_parameters_after=after,
        **fits,
    )


def _show(shown: Shown, plan: EmbeddingPlan, factors: Factors | None) -> None:
    own = ["embedding parameters", *change(*_embedding_parameters(shown.result.source, plan))]
    rows = [own, *shown.rows()]
    console.show(console.table("Embeddings", ("", "before", "after", "left"), rows))
    if factors is not None and (lines := _lines(factors)):
        columns = ("", "explained variance", "mean cosine", "parameters")
        console.show(console.table("How near the rows come", columns, lines))
    shown.show_place(dry="nothing is fitted or written")


def _lines(factors: Factors) -> list[list[str]]:
    rows = []
    if (fit := factors.fit) is not None:
        shape = fit.unit.shape
        rows.append([f"input, {shape.kind}", *_figures(fit.quality), f"{fit.parameters_after:,}"])
        if shape.kind != "projective":
            plain = f"input, projective with the same n = {shape.map_dim}"
            rows.append([plain, *_figures(fit.baseline), f"{fit.baseline_parameters:,}"])
    if (output := factors.output) is not None:
        cosine = "-" if output.quality is None else f"{output.quality.mean_cosine:.4f}"
        of = "the input's map table" if output.table is None else "its own map table"
        rows.append([f"output, through {of}", f"{output.explained_variance:.2%}", cosine, ""])
    return rows


def _figures(quality: RowQuality) -> tuple[str, str]:
    return f"{quality.explained_variance:.2%}", f"{quality.mean_cosine:.4f}"


def _quality(quality: RowQuality) -> dict[str, float]:
    return {"explained_variance": quality.explained_variance, "mean_cosine": quality.mean_cosine}
