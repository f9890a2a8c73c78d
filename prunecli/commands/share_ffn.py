"""`prunecli share-ffn`: share, drop, widen or narrow feed-forward networks, write a checkpoint with the result."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from prunecli.commands.checkpoints import with_demo_text
from prunecli.commands.command import command
from prunecli.commands.rewriting import RewritingOptions, ScoredOptions, output_option
from prunecli.errors import UsageError
from prunecli.methods.sharing.options import FfnOptions


class ShareFfn(RewritingOptions, ScoredOptions, FfnOptions):
    """Options of the command."""

    LEFT_OUT: ClassVar[frozenset[str]] = frozenset({"stream", "save_scores"})

    output: Path = output_option("shared-ffn")


@command(ShareFfn)
def share_ffn(options: ShareFfn) -> None:
    """Share or drop feed-forward networks, at any width. Weights are streamed: no model is built.

    Each layer keeps its own norm. Recover the quality with prunecli finetune.
    """
    from prunecli.commands.share_table import share_document, show_shared
    from prunecli.methods.sharing.rewrite import rewrite_shared
    from prunecli.planning import plan_ffn_on_text

    options.check_groups(2)
    is_dense_only = options.dense_only
    options = with_demo_text(options, options.checkpoint)
    options = options.model_copy(update={"dense_only": is_dense_only or options.checkpoint is None})
    with options.open() as opened:
        if options.checkpoint is None and not is_dense_only:
            options.note("The model is a mixture of experts: only its dense FFNs are shared (--dense-only).")
        plan = plan_ffn_on_text(opened, options, options.text_run(options, measures=False))
        scored = options if plan.decision is not None and options.keep_units != "norms" else None
        if scored is None and options.first_given is not None:
            raise UsageError(f"{options.first_given}: no text is read here.", "Leave it out.")
        options.note(*plan.reasons)
        shown = options.apply(opened, rewrite_shared(opened, plan), scored, options.device)
        options.show(lambda: share_document(shown, plan), lambda: show_shared(shown, plan))
