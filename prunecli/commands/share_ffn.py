"""`prunecli share-ffn`: share, drop, widen or narrow feed-forward networks, write a checkpoint with the result."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from prunecli.commands import console
from prunecli.commands.groups import flattened
from prunecli.commands.options import (
    CheckpointArgument,
    DenseOnlyOption,
    DtypeOption,
    OrderOption,
    SeedOption,
)
from prunecli.commands.rewriting import How
from prunecli.commands.text_options import UNLABELLED, TextOptions
from prunecli.errors import UsageError
from prunecli.methods.sharing.options import FfnInit, FfnOptions, KeepUnits, Treatment
from prunecli.tensors.quantities import whole_numbers


@flattened
def share_ffn(
    checkpoint: CheckpointArgument = None,
    config: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="A configuration of the paper: SharedEnc, SharedDec, SharedEncSharedDec, SharedEncDec, NoEnc, NoDec, "
            "NoEncNoDec, SharedEncNoDec, OneWide. Default: SharedEncNoDec; SharedEnc or SharedDec of a model with "
            "one side.",
        ),
    ] = None,
    encoder: Annotated[
        Treatment | None,
        typer.Option(help="The encoder's FFNs, instead of --config."),
    ] = None,
    decoder: Annotated[
        Treatment | None,
        typer.Option(help="The decoder's FFNs, instead of --config."),
    ] = None,
    width: Annotated[
        str | None,
        typer.Option(
            metavar="N|match",
            help="Hidden units of a shared FFN; match: as many as all that it stands for have together. Default: as "
            "--init makes it.",
        ),
    ] = None,
    init: Annotated[
        FfnInit | None,
        typer.Option(
            help="How a shared FFN is made of those that it stands for: the mean of their weights, the first, the "
            "last, or all side by side. Default: concat where --width is larger than theirs, else mean.",
        ),
    ] = None,
    scale: Annotated[
        float | None,
        typer.Option(
            help="Factor of a shared FFN's output. Default: 1; for concat of k 1/k: the mean of their outputs, not "
            "the sum.",
        ),
    ] = None,
    groups: Annotated[
        str | None,
        typer.Option(
            metavar="N[,M]",
            help="Shared FFNs of a side; or of the encoder, and of the decoder. Default: 1.",
        ),
    ] = None,
    order: OrderOption = None,
    keep_units: Annotated[
        KeepUnits | None,
        typer.Option(
            help="Which hidden units stay where an FFN gets narrower: those of the largest weights, or those that are "
            "most active on --data or --text (runs the model). Default: activations.",
        ),
    ] = None,
    texts: Annotated[TextOptions, UNLABELLED] = TextOptions(),
    dense_only: DenseOnlyOption = False,
    dtype: DtypeOption = None,
    seed: SeedOption = 0,
    how: How = How(Path("shared-ffn")),
) -> None:
    """Share or drop feed-forward networks, at any width; no model is built, no shard is held in memory.

    Each layer keeps its own norm. Quality comes back by training: prunecli finetune.
    """
    from prunecli.commands.share_table import parse_groups, share_document, show_shared
    from prunecli.methods.sharing.rewrite import rewrite_shared
    from prunecli.methods.units import TextRun
    from prunecli.planning import plan_ffn_on_text

    hidden: int | Literal["match"] | None = None
    if width is not None and width.strip().lower() == "match":
        hidden = "match"
    elif width is not None:
        numbers = whole_numbers(width)
        if len(numbers) != 1:
            raise UsageError(f"--width {width}: not a width.", "Give a number of hidden units, or match.")
        hidden = numbers[0]
    options = FfnOptions(
        config=config,
        encoder=encoder,
        decoder=decoder,
        width=hidden,
        init=init,
        scale=scale,
        groups=parse_groups(groups, 2, "Give N, or N,M for encoder and decoder."),
        order=order,
        keep_units=keep_units,
        dense_only=dense_only or checkpoint is None,
        dtype=dtype,
        seed=seed,
    )
    choice = texts.choice(checkpoint)
    with how.open(checkpoint) as opened:
        if checkpoint is None and not dense_only:
            how.note("It is a mixture of experts: only its dense FFNs are touched (--dense-only).")
        run = TextRun(choice, texts.running, progress=how.progress, say=console.note)
        plan = plan_ffn_on_text(opened, options, run)
        scored = choice if plan.decision is not None and keep_units != "norms" else None
        if scored is None and choice.first_given is not None:
            raise UsageError(f"{choice.first_given}: nothing here looks at text.", "Leave it out.")
        how.note(*plan.reasons)
        shown = how.apply(opened, rewrite_shared(opened, plan), scored, texts.device)
        how.show(lambda: share_document(shown, plan), lambda: show_shared(shown, plan))
