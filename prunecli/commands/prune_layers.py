"""`prunecli prune-layers`: remove whole transformer layers, write a checkpoint without them."""

from __future__ import annotations

from pathlib import Path

from prunecli.commands import console
from prunecli.commands.checkpoints import with_demo_text
from prunecli.commands.command import command
from prunecli.commands.rewriting import RewritingOptions, ScoredOptions, output_option
from prunecli.errors import UsageError
from prunecli.methods.options import LayerOptions


class PruneLayers(RewritingOptions, ScoredOptions, LayerOptions):
    """Options of the command."""

    output: Path = output_option("pruned-layers")


@command(PruneLayers)
def prune_layers(options: PruneLayers) -> None:
    """Remove the layers that change the hidden states least. The result is a stock model with fewer layers.

    Each stack keeps at least one layer. Recover the quality with prunecli finetune.
    """
    from prunecli.methods.layers.plan import LAST_WARNING, plan_layers

    options = with_demo_text(options, options.checkpoint)
    options.check_options()
    if not options.needs_text and options.first_given is not None:
        raise UsageError(
            f"{options.first_given}: no text is read here.", "Leave it out, or use `metric=cosine`."
        )
    if options.stream and options.needs_text:
        raise UsageError(
            f"`stream`: `metric={options.metric or 'cosine'}` runs the model, which needs all of its weights.",
            "Leave `stream` out, or choose by `metric=last`, `metric=random` or by number.",
        )
    run = options.text_run(options, measures=options.needs_text)
    with options.open() as opened:
        if options.metric == "last":
            console.warn(LAST_WARNING)
        plan = plan_layers(opened, options, run)
        options.note(*plan.reasons)
        scored = options if options.needs_text else None
        options.prune(opened, plan, options.seed, scored=scored, device=options.device)
