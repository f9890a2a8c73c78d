"""`prunecli prune-ffn`: remove hidden units of feed-forward networks, write a checkpoint with narrower ones."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from prunecli.commands import console
from prunecli.commands.groups import Helps, flattened
from prunecli.commands.options import (
    CheckpointArgument,
    DenseOnlyOption,
    ScoreFiles,
    SelectionOptions,
    SideName,
)
from prunecli.commands.rewriting import How
from prunecli.commands.text_options import UNLABELLED, TextOptions
from prunecli.errors import UsageError
from prunecli.methods.names import UnitMetric


@flattened
def prune_ffn(
    checkpoint: CheckpointArgument = None,
    selection: Annotated[
        SelectionOptions,
        Helps(
            ratio="Fraction of the hidden units to remove from each FFN, rounded up. Default: 0.25.",
            count="Number of hidden units to remove from all FFNs together, instead of --ratio.",
            keep="Ids of the hidden units to keep, instead of a metric: what --dry-run --json printed.",
            least="Number of hidden units that each FFN keeps at least.",
            multiple_of="Round widths down to a multiple of N.",
            uniform="Remove the same fraction of every FFN; or rank the units of all FFNs together, each score divided "
            "by the l2 norm over its FFN, so that widths differ, which no stock config can say. Default: uniform.",
        ),
    ] = SelectionOptions(uniform=True, least=1),
    width: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Hidden units that every FFN keeps, instead of --ratio.",
        ),
    ] = None,
    side: Annotated[
        SideName | None,
        typer.Option(help="The only stack whose FFNs get narrower."),
    ] = None,
    metric: Annotated[
        UnitMetric | None,
        typer.Option(
            help="What a unit is worth: activation, its root mean square on --data or --text; activation-norm, that "
            "times the norm of its output weights; norms, of all its weights, without text; random. Default: "
            "that of --scores, or activation-norm.",
        ),
    ] = None,
    texts: Annotated[TextOptions, UNLABELLED] = TextOptions(),
    files: ScoreFiles = ScoreFiles(),
    dense_only: DenseOnlyOption = False,
    how: How = How(Path("pruned-ffn")),
) -> None:
    """Remove the hidden units of FFNs that matter least; of one width everywhere, the result is a stock model.

    Quality comes back by training: prunecli finetune.
    """
    from prunecli.methods.ffn.narrow import NORMS_WARNING, NarrowOptions, plan_widths
    from prunecli.methods.units import TextRun

    choice = texts.choice(checkpoint)
    named = choice.first_given
    options = selection.of(
        NarrowOptions,
        width=width,
        side=side,
        metric=metric,
        scores=files.scores,
        dense_only=dense_only or checkpoint is None,
    )
    options.check()
    if not options.needs_text and named is not None:
        what = (
            f"--metric {metric} looks at no text." if metric and not files.scores else "no text is read here."
        )
        raise UsageError(f"{named}: {what}", "Leave it out.")
    save = files.saver(measures=options.needs_text, force=how.force)
    with how.open(checkpoint) as opened:
        if checkpoint is None and not dense_only:
            how.note("It is a mixture of experts: only its dense FFNs are touched (--dense-only).")
        if metric == "norms":
            console.warn(NORMS_WARNING)
        run = TextRun(choice, texts.running, save, how.progress, console.note)
        plan = plan_widths(opened, options, run)
        how.note(*plan.reasons)
        scored = choice if options.needs_text else None
        how.prune(opened, plan, options.seed, scored=scored, device=texts.device)
