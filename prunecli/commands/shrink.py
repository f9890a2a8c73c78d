"""`prunecli shrink`: make a model as small or as fast as asked, by removing units of all kinds."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import prunecli
from prunecli.commands import console
from prunecli.commands.checkpoints import with_demo_text
from prunecli.commands.command import command
from prunecli.commands.rewriting import RewritingOptions, change, output_option
from prunecli.shrinking.options import TARGETS, ShrinkOptions
from prunecli.text.choice import TextChoice

if TYPE_CHECKING:
    from prunecli.results.rewriting import Shrunk


class Shrink(RewritingOptions, TextChoice, ShrinkOptions):
    """Options of the command."""

    LEFT_OUT = frozenset({"check_text", "stream", "config_only", "explain", "source_file", "target_file"})

    output: Path = output_option("shrunk")


@command(Shrink)
def shrink(options: Shrink) -> None:
    """Make a model as small or as fast as asked: remove layers, heads, hidden units, experts and tokens.

    The units are scored on your text, a few shares of each kind are tried, and the cheapest mixture that reaches the
    target is measured against its neighbours. Everything that was tried goes to OUTPUT.shrink.json. The same command
    resumes an interrupted run.
    """
    from prunecli.shrinking.shrink import figures_path

    options.check_target()
    options = with_demo_text(options, options.checkpoint)
    with options.open() as source:
        if all(getattr(options, name) is None for name in TARGETS):
            console.note("No target given: keeping 75% of the parameters (--params 0.75).")
        result = prunecli.shrink(
            source,
            options,
            options,
            None if options.dry_run else options.output,
            force=options.force,
            **console.listeners(),
        )
    options.show(lambda: result, _blocks(result))
    if result.output is not None and not options.as_json:
        console.note(f"Everything that was tried: {figures_path(options.output)}")


def _blocks(result: Shrunk) -> Iterator[Any]:
    """Yield the mixture, the closing table and where the result is."""
    from prunecli.model.stock import StockSupport

    best = ", ".join(f"{share:.0%} of the {_NAMES.get(name, name)}" for name, share in result.shares.items())
    yield f"Removed: {best}; the best of {len(result.tried)} mixtures that were tried."
    if "tokens" in result.shares:
        tried = {name for one in result.tried for name in one.shares}
        others = ",".join(sorted(tried - {"tokens"}))
        yield f"Text of another kind falls into more tokens now; to keep all: --only {others}."
    stages = result.stages
    if stages:
        yield from result.shown
    else:
        sizes = change(result.parameters_before or 0, result.parameters_after or 0)
        yield "Parameters {before} -> {after} ({left})".format(**sizes)
    yield StockSupport(reason=result.stock["reason"], nearest=result.stock["nearest"]).line
    if result.output is None:
        yield "Dry run: nothing is written."
        return
    yield f"Written: {result.output}"
    asked, speedup = result.arguments.get("speed"), stages[-1].speedup
    if asked and speedup and speedup < asked:
        console.warn(
            f"Warning: measured again, it is {speedup:.2f} times as fast, and {asked:g} was asked for. Speeds "
            "on a busy machine differ from run to run."
        )
    costs = {stage.model: inf if stage.quality.cost is None else stage.quality.cost for stage in stages}
    if "healed" not in costs:
        yield "Training recovers part of what was lost: --heal 10m, with the original as teacher."
    elif costs["healed"] > costs["cut"]:
        console.warn(
            "Warning: training made the model worse on this text. Train on more text, or leave --heal out."
        )


_NAMES = {"units": "hidden units", "heads": "attention heads"}
