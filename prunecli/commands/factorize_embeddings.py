"""`prunecli factorize-embeddings`: a narrow table and a DeFINE unit in the place of an embedding table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

import typer

from prunecli.commands import console
from prunecli.commands.options import (
    CheckpointArgument,
    ConfigOnlyOption,
    DataOption,
    DryRunOption,
    DtypeOption,
    ForceOption,
    JsonOption,
    QuietOption,
    SeedOption,
    TextFilesOption,
)
from prunecli.commands.outputs import check_plot
from prunecli.commands.rewriting import How

if TYPE_CHECKING:
    from prunecli.methods.embeddings.plan import EmbeddingOptions
    from prunecli.model.checkpoint import Checkpoint
    from prunecli.model.define import UnitKind
    from prunecli.text.choice import Lines

SideName = Literal["input", "output", "both"]


def factorize_embeddings(
    checkpoint: CheckpointArgument = None,
    map_dim: Annotated[
        int | None,
        typer.Option(
            "--map-dim",
            metavar="N",
            help="Width n of the table that is left. Default: about an eighth of the model's width.",
            show_default=False,
        ),
    ] = None,
    expand_dim: Annotated[
        int | None,
        typer.Option(
            "--expand-dim",
            metavar="K",
            help="Width k that its rows are expanded to. Default: about twice the model's width.",
            show_default=False,
        ),
    ] = None,
    depth: Annotated[
        int | None,
        typer.Option("--depth", metavar="L", help="Expansion layers. Default: 3.", show_default=False),
    ] = None,
    max_groups: Annotated[
        int | None,
        typer.Option(
            "--max-groups",
            metavar="G",
            help="Groups of the first layer; each further one has half as many. Default: 4.",
            show_default=False,
        ),
    ] = None,
    kind: Annotated[
        str | None,
        typer.Option(
            "--kind",
            metavar="KIND",
            help="define, or one of the paper's ablations: hgt-no-mixing, hgt-no-skip, group-linear, linear, …; "
            "projective: no expansion at all. Default: define.",
            show_default=False,
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
            "--side",
            help="Which tables. Default: both where input and output share one (one side alone then saves nothing), "
            "else the input's.",
            show_default=False,
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
            "--split",
            metavar="A,B",
            help="Splits of --data whose tokens are counted. Default: train, val and dev, those that there are.",
            show_default=False,
        ),
    ] = None,
    langs: Annotated[
        str | None,
        typer.Option("--langs", metavar="A,B", help="Languages of --data; default: all.", show_default=False),
    ] = None,
    text: TextFilesOption = None,
    epochs: Annotated[
        int | None,
        typer.Option(
            "--epochs",
            min=0,
            metavar="N",
            help="Passes over the table at most; 0: the projective embedding as a unit. Default: as many as make a "
            "million rows, 4 to 60.",
            show_default=False,
        ),
    ] = None,
    dtype: DtypeOption = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            "--plot",
            metavar="FILE.png",
            help="Draw the correlations of the embedding's dimensions (Figures 4 and 7).",
            show_default=False,
        ),
    ] = None,
    seed: SeedOption = 0,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="The factorised checkpoint.")
    ] = Path("factorised-embeddings"),
    dry_run: DryRunOption = False,
    config_only: ConfigOnlyOption = False,
    force: ForceOption = False,
    quiet: QuietOption = False,
    json: JsonOption = False,
) -> None:
    """Replace embedding tables by narrower ones and a unit that is fitted to make the original rows of theirs.

    A token's row of width n is expanded by group transformations to k and reduced to the model's width. Where input
    and output share a table they go on sharing one: hidden states are projected to n in the output layer. Afterwards,
    finetune --teacher recovers the quality.
    """
    from prunecli.methods.embeddings.plan import EmbeddingOptions
    from prunecli.text.choice import TextChoice

    options = EmbeddingOptions(
        side=side,
        map_dim=map_dim,
        expand_dim=expand_dim,
        depth=depth,
        max_groups=max_groups,
        kind=cast("UnitKind | None", kind),  # its own check names those that there are
        shared_blocks=shared_blocks,
        reduction=not no_reduction,
        cache=cache,
        epochs=epochs,
        dtype=dtype,
        seed=seed,
    )
    how = How(None if dry_run else output, force, quiet, json, not config_only)
    if plot is not None:
        check_plot(plot, force=force or dry_run)
    with how.open(checkpoint) as opened:
        how.check(opened)
        lines = TextChoice(data=data, split=split, langs=langs, files=tuple(text or ())).lines()
        _run(opened, options, lines, plot, how)


def _run(checkpoint: Checkpoint, options: EmbeddingOptions, text: Lines, plot: Path | None, how: How) -> None:
    from prunecli.commands.embedding_plot import draw, require_unit
    from prunecli.commands.embedding_table import growth, payload, show
    from prunecli.methods.embeddings.factorize import fit_embeddings
    from prunecli.methods.embeddings.plan import plan_embeddings
    from prunecli.methods.embeddings.rewrite import rewrite_embeddings

    plan = plan_embeddings(checkpoint, options, text)
    if plot is not None:
        require_unit(plan)
    how.note(*plan.reasons)
    if (warning := growth(checkpoint, plan)) is not None:
        console.warn(warning)
    is_fitted = how.output is not None and how.weights
    factors = fit_embeddings(checkpoint, plan, how.progress) if is_fitted else None
    shown = how.apply(checkpoint, rewrite_embeddings(checkpoint, plan, factors))
    if plot is not None and factors is not None:
        draw(checkpoint, plan, factors, plot, how.progress)
    how.show(lambda: payload(shown, plan, factors), lambda: show(shown, plan, factors))
