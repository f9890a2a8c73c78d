"""`prunecli prune-ffn`: remove hidden units of feed-forward networks, write a checkpoint with narrower ones."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from prunecli.commands import console
from prunecli.commands.groups import flattened
from prunecli.commands.options import (
    CheckpointArgument,
    DenseOnlyOption,
    DtypeOption,
    SeedOption,
    SideName,
)
from prunecli.commands.rewriting import How
from prunecli.commands.text_options import UNLABELLED, TextOptions
from prunecli.errors import UsageError
from prunecli.methods.ffn.names import UnitScore
from prunecli.tensors.quantities import parse_share


@flattened
def prune_ffn(
    checkpoint: CheckpointArgument = None,
    ratio: Annotated[
        float | None,
        typer.Option(
            parser=parse_share,
            metavar="R",
            help="Fraction of the hidden units to remove, of each FFN; never less is removed. Default: 0.25.",
        ),
    ] = None,
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
    per_layer: Annotated[
        bool,
        typer.Option(
            "--per-layer",
            help="Rank the units of all FFNs together, each score divided by the l2 norm over its FFN: widths differ "
            "then, which no stock config can say.",
        ),
    ] = False,
    score: Annotated[
        UnitScore | None,
        typer.Option(
            help="What a unit is worth: activation, its root mean square on --data or --text; activation-norm, that "
            "times the norm of its output weights; norms, of all its weights, without text; random. Default: "
            "activation-norm.",
        ),
    ] = None,
    round_to: Annotated[
        int,
        typer.Option(min=1, help="Widths become multiples of it, the next lower."),
    ] = 1,
    texts: Annotated[TextOptions, UNLABELLED] = TextOptions(),
    dense_only: DenseOnlyOption = False,
    dtype: DtypeOption = None,
    seed: SeedOption = 0,
    how: How = How(Path("pruned-ffn")),
) -> None:
    """Remove the hidden units of FFNs that matter least; of one width everywhere, the result is a stock model.

    Quality comes back by training: prunecli finetune.
    """
    from prunecli.methods.ffn.narrow import MEASURED, NORMS_WARNING, NarrowOptions, refuse_contradictions

    choice = texts.choice(checkpoint)
    named = choice.first_given
    options = NarrowOptions(
        ratio=ratio,
        width=width,
        side=side,
        per_layer=per_layer,
        score=score or "activation-norm",
        round_to=round_to,
        dense_only=dense_only or checkpoint is None,
        dtype=dtype,
        seed=seed,
    )
    refuse_contradictions(options)
    if options.score not in MEASURED and named is not None:
        raise UsageError(f"{named}: --score {options.score} looks at no text.", "Leave it out.")
    with how.open(checkpoint) as opened:
        if checkpoint is None and not dense_only:
            how.note("It is a mixture of experts: only its dense FFNs are touched (--dense-only).")
        from prunecli.planning import plan_widths_on_text
        from prunecli.selection.cut import cut

        if score == "norms":
            console.warn(NORMS_WARNING)
        plan = plan_widths_on_text(
            opened, choice, options, texts.running, progress=how.progress, say=console.note
        )
        how.note(*plan.reasons)
        scored = choice if options.score in MEASURED else None
        shown = how.apply(opened, cut(opened, plan), scored, texts.device)
        how.show(lambda: shown.selected(plan, seed), lambda: shown.show_selected(plan))
