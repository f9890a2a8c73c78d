"""The commands that remove experts, heads, hidden units of FFNs, layers or tokens; `shrink` removes all of them."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import prunecli
from prunecli.commands import console
from prunecli.commands.checkpoints import DEMO, DemoName, with_demo_text
from prunecli.commands.command import command
from prunecli.commands.rewriting import (
    RewritingOptions,
    ScoredOptions,
    WordsOptions,
    change,
    dense_for_demo,
    output_option,
)
from prunecli.errors import UsageError
from prunecli.methods.options import (
    ExpertOptions,
    HeadOptions,
    LayerOptions,
    NarrowOptions,
    VocabularyOptions,
)
from prunecli.options import selection_option
from prunecli.shrinking.options import TARGETS, ShrinkOptions
from prunecli.text.choice import TextChoice

if TYPE_CHECKING:
    from prunecli.results.rewriting import Shrunk


class PruneExperts(RewritingOptions, ExpertOptions):
    """Options of the command."""

    demo_model: DemoName = DEMO
    output: Path = output_option("pruned-experts")


@command
def prune_experts(options: PruneExperts) -> None:
    """Remove the experts that the given languages or texts need least. Weights are streamed: no model is built.

    A checkpoint that was pruned before can be pruned further.
    """
    if options.keep is not None and "gates" in options.model_fields_set and not options.constant:
        raise UsageError("`gates` does not go with `keep`.", "Give statistics, or ids.")
    with options.open(options.demo_model) as opened:
        from prunecli.methods.experts.metrics import WITHOUT_STATISTICS, aimer_bytes
        from prunecli.methods.experts.options import explain, of_language_model

        if opened.is_remote and (nbytes := aimer_bytes(opened, options)):
            text = console.bytes_text(nbytes)
            console.note(f"aimer fetches {text} of experts to rank them; kept experts are fetched once more.")
        plan = prunecli.plan_experts(opened, options, console.progress())
        console.note(*plan.reasons)
        if plan.warning is not None:
            console.warn(plan.warning)
        named = options.sources + options.targets + options.texts
        if options.keep is None and options.metric not in WITHOUT_STATISTICS and not named:
            files = ", ".join(map(str, options.files))
            what, keep = "languages", "`sources` and `targets` choose"
            if of_language_model(opened):
                what, keep = "texts", "`texts` chooses"
            console.note(f"No {what} named: all of {files} count; {keep} those that you need.")
        rewrite = None
        if options.constant:
            means = prunecli.mean_outputs(opened, options.files, options.texts)
            rewrite = prunecli.rewrite_constant(opened, plan, means)
        fit: Any = plan.details.get("fit")
        options.prune(
            opened,
            plan,
            rewrite=rewrite,
            before=() if fit is None else explain(fit),
        )


class PruneHeads(RewritingOptions, HeadOptions):
    """Options of the command."""

    LEFT_OUT = ("stream",)

    output: Path = output_option("pruned-heads")


@command
def prune_heads(options: PruneHeads) -> None:
    """Remove the attention heads that matter least. Weights are streamed: no model is built.

    A layer may lose all of its heads. A checkpoint that was pruned before can be pruned further.
    """
    with options.open() as opened:
        plan = prunecli.plan_heads(opened, options)
        console.note(*plan.reasons)
        options.prune(opened, plan)


class PruneFfn(ScoredOptions, NarrowOptions):
    """Options of the command."""

    LEFT_OUT = ("stream",)

    output: Path = output_option("pruned-ffn")


@command
def prune_ffn(options: PruneFfn) -> None:
    """Remove the hidden units of FFNs that matter least. If all FFNs get the same width, the result is a stock model.

    Recover the quality with prunecli finetune.
    """
    from prunecli.methods.plans import NORMS_WARNING

    options = dense_for_demo(options)
    options.check_options()
    options = _with_text(options, reads=options.needs_text)
    if options.metric == "gradient":
        options.refuse(["batch_tokens"], "does not go with `metric=gradient`.")
    with options.open() as opened:
        if options.metric == "norms":
            console.warn(NORMS_WARNING)
        selection = prunecli.plan_widths(opened, options, options.text_run(measures=options.needs_text))
        console.note(*selection.reasons)
        options.prune(opened, selection, scored=options if options.needs_text else None)


class PruneLayers(ScoredOptions, LayerOptions):
    """Options of the command."""

    LEFT_OUT = ("memory", "spill_directory")

    replace: Literal["linear"] | None = selection_option(
        "linear: multiply a linear map into the FFN before removed layers that does about what they did, by least "
        "squares on the text (ReplaceMe).",
        recorded=False,
    )
    output: Path = output_option("pruned-layers")


@command
def prune_layers(options: PruneLayers) -> None:
    """Remove the layers that change the hidden states least. The result is a stock model with fewer layers.

    Each stack keeps at least one layer. Recover the quality with prunecli finetune.
    """
    from prunecli.methods.plans import LAST_WARNING

    reads = options.needs_text or options.replace is not None
    if options.stream and reads:
        what = "replace=linear" if options.replace else f"metric={options.metric or 'cosine'}"
        raise UsageError(
            f"`stream`: `{what}` runs the model, which needs all of its weights.",
            "Leave `stream` out, or choose by `metric=last`, `metric=random` or by number.",
        )
    options = _with_text(options, reads=reads)
    with options.open() as opened:
        if options.metric == "last":
            console.warn(LAST_WARNING)
        run = options.text_run(measures=options.needs_text)
        selection = prunecli.plan_layers(opened, options, run)
        console.note(*selection.reasons)
        rewrite = _with_maps(opened, selection, run) if options.replace else None
        options.prune(opened, selection, rewrite=rewrite, scored=options if reads else None)


def _with_maps(
    source: prunecli.Checkpoint, selection: prunecli.Selection, run: prunecli.TextRun
) -> prunecli.Rewrite:
    """Remove layers, and leave linear maps in their place."""
    from prunecli.evaluation.on_text import measured_text
    from prunecli.methods.layers.score import Maps

    data, maps = measured_text(source, run.choice, "`replace=linear`"), Maps()
    rewrite = prunecli.cut_replaced(source, selection, data, run, maps)
    if maps:
        run.say("FFNs before removed layers have linear maps that do about what these did.")
    return rewrite


Measured = TypeVar("Measured", PruneFfn, PruneLayers)
"""Options of commands that measure units on text before they remove them."""


def _with_text(options: Measured, *, reads: bool) -> Measured:
    """Return the options with the demo's text, and refuse text that is not read.

    Args:
        reads: whether the command reads text.

    Raises:
        UsageError: text is given, and nothing is measured.
    """
    if not reads:
        reads_none = options.metric and not options.scores and not options.is_named
        what = f"`metric={options.metric}` reads no text." if reads_none else "no text is read here."
        options.refuse(options.given, f"is of no use: {what}")
    return with_demo_text(options, options.checkpoint)


DEMO_SPLIT = "val"
"""Split of the demo's text, if none is given: its train split has every token."""


class TrimVocabulary(RewritingOptions, WordsOptions, VocabularyOptions):
    """Options of the command."""

    keep_file: Path | None = selection_option(
        "Further tokens to keep, one on each line, as the tokenizer writes them.",
        flag="--keep",
        role="input",
    )
    output: Path = output_option("trimmed-vocabulary")


@command
def trim_vocabulary(options: TrimVocabulary) -> None:
    """Remove the tokens that the given text does not need, from the embeddings and from the tokenizer.

    Special and added tokens, the codes of all languages, single characters, bytes and the tokens of the chat template
    are always kept. The text becomes the same tokens as before, under new ids; this is checked before anything is
    written. Other text becomes smaller tokens.
    """
    from prunecli.text.files import read_lines

    if options.data is None and not options.files:
        if options.checkpoint is not None:  # the demo's text would be the wrong one
            raise UsageError(
                "No text is given, from which tokens are chosen.", "Give `data`, `files`, or both."
            )
        options = options.updated(split=options.split or DEMO_SPLIT, demo=prunecli.demo.DATA)
    with options.open() as opened:
        opened.require_architecture()
        kept = () if options.keep_file is None else filter(None, read_lines(options.keep_file))
        options = options.updated(keep=tuple(dict.fromkeys(kept)))
        plan = prunecli.plan_vocabulary(opened, options.lines(console.note), options, console.progress())
        for name in (name for name, content in plan.files.items() if content is None):
            console.note(
                f"{name} is left out: it holds the old vocabulary in a form that cannot be shortened."
            )
        options.prune(opened, plan, before=_tokens(plan.details))


def _tokens(details: Mapping[str, Any]) -> console.Blocks:
    """Yield why tokens stay, and whether the text falls into the same tokens."""
    rows = [{"why": name, "tokens": f"{count:,}"} for name, count in details["parts"].items()]
    yield console.table("Kept tokens", rows)
    found = details["compared"]
    if found["changed"]:
        yield (
            f"{details['text']['share_kept']:.2%} of the running tokens are kept; {found['changed']:,} of "
            f"{found['sentences']:,} different texts fall into other tokens "
            f"({found['running_before']:,} -> {found['running_after']:,} in all)."
        )
    else:
        yield f"All {found['sentences']:,} different texts fall into the same tokens as before."


class Shrink(RewritingOptions, TextChoice, ShrinkOptions):
    """Options of the command."""

    LEFT_OUT = ("check_text", "stream", "config_only", "explain", "source_file", "target_file")

    output: Path = output_option("shrunk")


@command
def shrink(options: Shrink) -> None:
    """Make a model as small or as fast as asked: remove layers, heads, hidden units, experts and tokens.

    The units are scored on your text, a few shares of each kind are tried, and the cheapest mixture that reaches the
    target is measured against its neighbours. Everything that was tried goes to OUTPUT.shrink.json. The same command
    resumes an interrupted run.
    """
    from prunecli.shrinking.shrink import figures_path

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


def _blocks(result: Shrunk) -> console.Blocks:
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
