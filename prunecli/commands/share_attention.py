"""`prunecli share-attention`: share or drop attentions, write a checkpoint with the result."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from prunecli.commands.command import command
from prunecli.commands.rewriting import RewritingOptions, output_option
from prunecli.methods.sharing.options import AttentionOptions


class ShareAttention(RewritingOptions, AttentionOptions):
    """Options of the command."""

    LEFT_OUT: ClassVar[frozenset[str]] = frozenset({"stream", "explain"})

    output: Path = output_option("shared-attention")


@command(ShareAttention)
def share_attention(options: ShareAttention) -> None:
    """Share or drop self- and cross-attention. Weights are streamed: no model is built.

    Each layer keeps its own norms and its own part of the cache. The result loses more quality than one with shared
    FFNs. Recover the quality with prunecli finetune.
    """
    from prunecli.commands.share_ffn import share_document, show_shared
    from prunecli.methods.sharing.plan import plan_attention, rewrite_shared

    options.check_groups(3)
    with options.open() as opened:
        plan = plan_attention(opened, options)
        options.note(*plan.reasons)
        shown = options.apply(opened, rewrite_shared(opened, plan))
        options.show(lambda: share_document(shown, plan), lambda: show_shared(shown, plan))
