"""`prunecli share-attention`: share or drop attentions, write a checkpoint with the result."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from prunecli.commands.groups import Without, flattened
from prunecli.commands.options import CheckpointArgument, DtypeOption, OrderOption
from prunecli.commands.rewriting import How
from prunecli.methods.sharing.options import AttentionOptions, Init, Treatment


@flattened
def share_attention(
    checkpoint: CheckpointArgument = None,
    config: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="What happens to self-attention, in the paper's words: SharedEnc, SharedDec, SharedEncSharedDec, "
            "NoEnc, NoDec, NoEncNoDec, SharedEncNoDec. Default, where none of the four is given: SharedEncSharedDec, "
            "or Shared of a model with one side.",
        ),
    ] = None,
    encoder: Annotated[
        Treatment | None,
        typer.Option(help="The encoder's self-attention, instead of --config."),
    ] = None,
    decoder: Annotated[
        Treatment | None,
        typer.Option(help="The decoder's self-attention, instead of --config."),
    ] = None,
    cross: Annotated[
        Treatment | None,
        typer.Option(help="Cross-attention. Default: keep."),
    ] = None,
    init: Annotated[
        Init | None,
        typer.Option(
            help="What a shared attention is made of: the mean of those that it stands for, the first, or the last. "
            "Default: mean.",
        ),
    ] = None,
    groups: Annotated[
        str | None,
        typer.Option(
            metavar="N[,M[,K]]",
            help="Shared attentions of each kind; or of the encoder and of the decoder; or of these and of "
            "cross-attention. Default: 1.",
        ),
    ] = None,
    order: OrderOption = None,
    dtype: DtypeOption = None,
    how: Annotated[How, Without({"explain"})] = How(Path("shared-attention")),
) -> None:
    """Share or drop self- and cross-attention; no model is built, no shard is held in memory.

    Each layer keeps its own norms and its own part of the cache. It costs more quality than sharing FFNs does; what
    comes back, comes back by training: prunecli finetune.
    """
    from prunecli.commands.share_table import parse_groups, share_document, show_shared
    from prunecli.methods.sharing.plan import plan_attention
    from prunecli.methods.sharing.rewrite import rewrite_shared

    remedy = "Give N; or N,M for encoder and decoder; or N,M,K for these and cross-attention."
    options = AttentionOptions(
        config, encoder, decoder, cross, parse_groups(groups, 3, remedy), order, init, dtype
    )
    with how.open(checkpoint) as opened:
        plan = plan_attention(opened, options)
        how.note(*plan.reasons)
        shown = how.apply(opened, rewrite_shared(opened, plan))
        how.show(lambda: share_document(shown, plan), lambda: show_shared(shown, plan))
