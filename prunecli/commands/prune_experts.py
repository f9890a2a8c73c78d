"""`prunecli prune-experts`: choose the experts that some languages need, write a checkpoint with those."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prunecli.commands import console
from prunecli.commands.checkpoints import DemoOption
from prunecli.commands.groups import flattened
from prunecli.commands.options import (
    CheckpointArgument,
    DtypeOption,
    FitBatchOption,
    FitBeamOption,
    FitLengthOption,
    SeedOption,
    StreamOption,
    fit_load,
)
from prunecli.commands.rewriting import How, Shown
from prunecli.errors import UsageError
from prunecli.methods.experts.names import Granularity, MetricName, Predicting, Strategy
from prunecli.tensors.quantities import parse_names, parse_share, whole_numbers

if TYPE_CHECKING:
    from prunecli.methods.experts.options import ExpertOptions
    from prunecli.methods.experts.plan import ExpertPlan
    from prunecli.model.checkpoint import Checkpoint
    from prunecli.results.rewriting import Selected

MIN_TOKENS = 100
"""That of `ExpertOptions`, which is not imported for --help."""


@flattened
def prune_experts(
    checkpoint: CheckpointArgument = None,
    gates: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="Gate statistics of the checkpoint, or of the one that it was pruned from; several are "
            "merged. The authors' published files work too. Default: gates.json.",
        ),
    ] = None,
    experts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Ids of the experts to keep, instead of statistics: the authors' experts.json, a list, or "
            'what --dry-run --json printed, of which {"kept": {LAYER: [ids]}} is enough.',
        ),
    ] = None,
    ratio: Annotated[
        float | None,
        typer.Option(
            parser=parse_share,
            metavar="R",
            help="Fraction of the experts to remove, counted from those that the checkpoint holds; never "
            "less is removed. Default: 0.8, of language models 0.25.",
        ),
    ] = None,
    fit: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Remove as few experts as fit in this memory (30GiB) while it decodes the load of the other "
            "--fit options, with 10% left free.",
        ),
    ] = None,
    experts_per_layer: Annotated[
        str | None,
        typer.Option(
            metavar="E,D",
            help="Experts to keep in each encoder and decoder layer: 36,12; one number for all.",
        ),
    ] = None,
    round_to: Annotated[
        int,
        typer.Option(
            min=1,
            help="Keep a multiple of N experts in each layer, which some kernels need (4, 8).",
        ),
    ] = 1,
    mtp: Annotated[
        Predicting,
        typer.Option(
            metavar="prune|drop",
            help="Layers that predict further tokens: prune their experts too, by their weights alone (aimer), or drop "
            "the layers.",
        ),
    ] = "prune",
    active: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Experts that the router picks for each token from now on: fewer are faster, and less good. "
            "Default: as many as before.",
        ),
    ] = None,
    metric: Annotated[
        MetricName | None,
        typer.Option(
            metavar="NAME",
            help="What makes an expert important: importance, top1, top2, load-balance, importance-vanilla; of "
            "language models also reap, ean, weighted-ean, frequency, seer, man, msan; of weights alone aimer; or, as "
            "a baseline, random. Default: importance; of language models reap.",
        ),
    ] = None,
    strategy: Annotated[
        Strategy,
        typer.Option(
            metavar="NAME",
            help="per-layer: fixed numbers; global-threshold, side-threshold: one for the model or for each side.",
        ),
    ] = "per-layer",
    balance: Annotated[
        str | None,
        typer.Option(
            metavar="ENC:DEC",
            help="Encoder experts kept per decoder expert. Default: the paper's 3:1 for 128 experts a layer or more, "
            "else 1:1.",
        ),
    ] = None,
    min_per_layer: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Experts to keep in each layer at least; default: 4 under a threshold, else what the "
            "router picks for a token.",
        ),
    ] = None,
    granularity: Annotated[
        Granularity | None,
        typer.Option(
            metavar="NAME",
            help="Which statistics are summed: language: the encoder's by source and the decoder's by target; pair: "
            "those of the pairs; global: all. Default: language with --source or --target, else global.",
        ),
    ] = None,
    source: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="Languages to translate from."),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(metavar="C,D", help="Languages to translate into."),
    ] = None,
    texts: Annotated[
        str | None,
        typer.Option(
            "--for",
            metavar="A,B",
            help="Of language models: texts of the statistics that count; default: all.",
        ),
    ] = None,
    min_tokens: Annotated[
        int,
        typer.Option(
            min=0,
            help="Of language models: warn of experts that saw fewer tokens than this.",
        ),
    ] = MIN_TOKENS,
    constant_experts: Annotated[
        bool,
        typer.Option(
            "--constant-experts",
            help="Of language models: experts that go leave their mean output behind (collect-gates --mean-outputs); "
            "the router stays, layers may differ, and vLLM from 0.33 on opens it.",
        ),
    ] = False,
    dtype: DtypeOption = None,
    fit_batch: FitBatchOption = None,
    fit_beam: FitBeamOption = None,
    fit_length: FitLengthOption = None,
    seed: SeedOption = 0,
    demo: DemoOption = "translation",
    stream: StreamOption = False,
    how: How = How(Path("pruned-experts")),
) -> None:
    """Remove the experts that the given languages or texts need least; no model is built, no shard is held in memory.

    A checkpoint that was pruned before can be pruned further: --ratio counts from what it holds.
    """
    from prunecli.methods.experts.budget import parse_balance
    from prunecli.methods.experts.options import Amount, ExpertOptions, default_ratio
    from prunecli.tensors.quantities import parse_size

    if experts is not None and gates and not constant_experts:
        raise UsageError("--gates and --experts exclude each other.", "Give statistics, or ids.")
    per_layer = None if experts_per_layer is None else _per_layer(experts_per_layer)
    options = ExpertOptions(
        gates=tuple(gates or (Path("gates.json"),)),
        experts=experts,
        amount=Amount(ratio, None if fit is None else parse_size(fit), per_layer),
        metric=metric,
        strategy=strategy,
        balance=None if balance is None else parse_balance(balance),
        minimum=min_per_layer,
        granularity=granularity,
        sources=parse_names("--source", source),
        targets=parse_names("--target", target),
        texts=parse_names("--for", texts),
        min_tokens=min_tokens,
        round_to=round_to,
        mtp=mtp,
        active=active,
        constant=constant_experts,
        dtype=dtype,
        seed=seed,
        load=fit_load(fit, fit_batch, fit_beam, fit_length),
    )
    with how.open(checkpoint, demo, stream=stream) as opened:
        if options.experts is None and options.amount == Amount():
            how.note(
                f"No --ratio given: removing at least {100 * default_ratio(opened):.0f}% of the experts."
            )
        _run(opened, options, how)


def _run(checkpoint: Checkpoint, options: ExpertOptions, how: How) -> None:
    from prunecli.methods.experts.aimer import aimer_bytes
    from prunecli.methods.experts.constant import mean_outputs, rewrite_constant
    from prunecli.methods.experts.metrics import WITHOUT_STATISTICS
    from prunecli.methods.experts.options import of_language_model
    from prunecli.methods.experts.plan import plan_experts
    from prunecli.selection.cut import cut

    if checkpoint.is_remote and (nbytes := aimer_bytes(checkpoint, options)):
        text = console.bytes_text(nbytes)
        how.note(
            f"aimer fetches {text} of experts to choose among them; those that stay are fetched once more."
        )
    plan = plan_experts(checkpoint, options, how.progress)
    how.note(*plan.reasons)
    if plan.warning is not None:
        console.warn(plan.warning)
    named = options.sources + options.targets + options.texts
    if options.experts is None and options.metric not in WITHOUT_STATISTICS and not named:
        files = ", ".join(map(str, options.files))
        if of_language_model(checkpoint):
            how.note(f"No texts named: all of {files} count; --for keeps what yours need.")
        else:
            how.note(f"No languages named: all of {files} count; --source and --target keep what yours need.")
    if options.constant:
        means = mean_outputs(checkpoint, options.files, options.texts)
        rewrite = rewrite_constant(checkpoint, plan, means)
    else:
        rewrite = cut(checkpoint, plan)
    shown = how.apply(checkpoint, rewrite)
    how.show(lambda: _document(shown, plan, options.seed), lambda: _show(shown, plan))


def _document(shown: Shown, plan: ExpertPlan, seed: int) -> Selected:
    from prunecli.methods.experts.memory_fit import fit_payload
    from prunecli.model.structure import STATISTICS_OF

    return shown.selected(
        plan,
        seed,
        statistics_of=plan.step.get(STATISTICS_OF),
        thresholds=plan.thresholds,
        fit=None if plan.fit is None else fit_payload(plan.fit),
        few_tokens=plan.few,
    )


def _show(shown: Shown, plan: ExpertPlan) -> None:
    from prunecli.methods.experts.memory_fit import explain

    for line in () if plan.fit is None else explain(plan.fit):
        console.out(line)
    shown.show_selected(plan)


def _per_layer(text: str) -> dict[Any, int]:
    """`36,12` -> encoder 36, decoder 12; one number holds for both."""
    numbers = whole_numbers(text)
    if not 1 <= len(numbers) <= 2 or min(numbers) < 0:
        raise UsageError(
            f"--experts-per-layer {text!r} is not ENCODER,DECODER.", "Give two whole numbers, such as 36,12."
        )
    return {"encoder": numbers[0], "decoder": numbers[-1]}
