"""`prunecli prune-experts`: choose the experts that some languages or texts need, write a checkpoint with those."""

from __future__ import annotations

from pathlib import Path

from prunecli.commands import console
from prunecli.commands.checkpoints import DEMO, DemoName
from prunecli.commands.command import command
from prunecli.commands.rewriting import RewritingOptions, output_option
from prunecli.errors import UsageError
from prunecli.methods.options import ExpertOptions


class PruneExperts(RewritingOptions, ExpertOptions):
    """Options of the command."""

    demo_model: DemoName = DEMO
    output: Path = output_option("pruned-experts")


@command(PruneExperts)
def prune_experts(options: PruneExperts) -> None:
    """Remove the experts that the given languages or texts need least. Weights are streamed: no model is built.

    A checkpoint that was pruned before can be pruned further.
    """
    if options.keep is not None and "gates" in options.model_fields_set and not options.constant:
        raise UsageError("`gates` does not go with `keep`.", "Give statistics, or ids.")
    if options.fit is None:
        for name in ("fit_batch", "fit_beam", "fit_length"):
            if name in options.changed:
                raise UsageError(f"`{name}` goes with `fit`.", "Give `fit`, or leave it out.")
    with options.open(options.demo_model) as opened:
        from prunecli.methods.experts.constant import mean_outputs, rewrite_constant
        from prunecli.methods.experts.metrics import WITHOUT_STATISTICS, aimer_bytes
        from prunecli.methods.experts.options import default_ratio, explain, of_language_model
        from prunecli.methods.experts.plan import plan_experts

        if options.keep is None and not options.has_amount:
            share = default_ratio(opened)
            options.note(f"No `ratio` given: removing at least {100 * share:.0f}% of the experts.")
        if opened.is_remote and (nbytes := aimer_bytes(opened, options)):
            text = console.bytes_text(nbytes)
            options.note(f"aimer fetches {text} of experts to rank them; kept experts are fetched once more.")
        plan = plan_experts(opened, options, options.progress)
        options.note(*plan.reasons)
        if plan.warning is not None:
            console.warn(plan.warning)
        named = options.sources + options.targets + options.texts
        if options.keep is None and options.metric not in WITHOUT_STATISTICS and not named:
            files = ", ".join(map(str, options.files))
            what, keep = "languages", "`sources` and `targets` choose"
            if of_language_model(opened):
                what, keep = "texts", "`texts` chooses"
            options.note(f"No {what} named: all of {files} count; {keep} those that you need.")
        rewrite = None
        if options.constant:
            rewrite = rewrite_constant(opened, plan, mean_outputs(opened, options.files, options.texts))
        memory = plan.fit
        options.prune(
            opened,
            plan,
            options.seed,
            rewrite=rewrite,
            table=lambda: None if memory is None else console.out("\n".join(explain(memory))),
        )
