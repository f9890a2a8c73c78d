"""`prunecli prune-heads`: choose the attention heads that matter least, write a checkpoint without them."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from prunecli.commands.command import command
from prunecli.commands.rewriting import RewritingOptions, output_option
from prunecli.errors import UsageError
from prunecli.methods.options import HeadOptions


class PruneHeads(RewritingOptions, HeadOptions):
    """Options of the command."""

    LEFT_OUT: ClassVar[frozenset[str]] = frozenset({"stream"})

    output: Path = output_option("pruned-heads")


@command(PruneHeads)
def prune_heads(options: PruneHeads) -> None:
    """Remove the attention heads that matter least. Weights are streamed: no model is built.

    A layer may lose all of its heads. A checkpoint that was pruned before can be pruned further.
    """
    from prunecli.methods.heads.plan import plan_heads

    if options.keep is not None and ("scores" in options.model_fields_set or options.metric == "random"):
        raise UsageError("`keep` does not go with `scores` and `metric=random`.", "Give scores, or ids.")
    with options.open() as opened:
        plan = plan_heads(opened, options)
        options.note(*plan.reasons)
        options.prune(opened, plan, options.seed)
