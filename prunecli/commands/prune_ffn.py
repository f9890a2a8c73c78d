"""`prunecli prune-ffn`: remove hidden units of feed-forward networks, write a checkpoint with narrower ones."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from prunecli.commands import console
from prunecli.commands.checkpoints import with_demo_text
from prunecli.commands.command import command
from prunecli.commands.rewriting import RewritingOptions, ScoredOptions, output_option
from prunecli.errors import UsageError
from prunecli.methods.options import NarrowOptions


class PruneFfn(RewritingOptions, ScoredOptions, NarrowOptions):
    """Options of the command."""

    LEFT_OUT: ClassVar[frozenset[str]] = frozenset({"stream"})

    output: Path = output_option("pruned-ffn")


@command(PruneFfn)
def prune_ffn(options: PruneFfn) -> None:
    """Remove the hidden units of FFNs that matter least. If all FFNs get the same width, the result is a stock model.

    Recover the quality with prunecli finetune.
    """
    from prunecli.methods.ffn.narrow import NORMS_WARNING, plan_widths

    options = with_demo_text(options, options.checkpoint)
    is_dense_only = options.dense_only
    options = options.model_copy(update={"dense_only": is_dense_only or options.checkpoint is None})
    options.check_options()
    if not options.needs_text and options.first_given is not None:
        what = "no text is read here."
        if options.metric and not options.scores:
            what = f"`metric={options.metric}` reads no text."
        raise UsageError(f"{options.first_given}: {what}", "Leave it out.")
    run = options.text_run(options, measures=options.needs_text)
    with options.open() as opened:
        if options.checkpoint is None and not is_dense_only:
            options.note(
                "The model is a mixture of experts: only its dense FFNs get narrower (--dense-only)."
            )
        if options.metric == "norms":
            console.warn(NORMS_WARNING)
        plan = plan_widths(opened, options, run)
        options.note(*plan.reasons)
        scored = options if options.needs_text else None
        options.prune(opened, plan, options.seed, scored=scored, device=options.device)
