"""`prunecli prune-experts`: choose the experts that some languages need, write a checkpoint with those."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from prunecli.commands import console
from prunecli.commands.checkpoints import DemoOption
from prunecli.commands.groups import Helps, Without, flattened
from prunecli.commands.options import (
    CheckpointArgument,
    FitBatchOption,
    FitBeamOption,
    FitLengthOption,
    SelectionOptions,
    StreamOption,
    fit_load,
)
from prunecli.commands.rewriting import How
from prunecli.errors import UsageError
from prunecli.methods.experts.names import MIN_TOKENS, Granularity, MetricName, Predicting, Strategy
from prunecli.tensors.quantities import parse_names, whole_numbers


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
    selection: Annotated[
        SelectionOptions,
        Without({"uniform"}),
        Helps(
            ratio="Fraction of the experts to remove, of those that the checkpoint holds; rounded up. Default: 0.8, of "
            "language models 0.25.",
            count="Number of experts to remove, in all layers together, instead of --ratio.",
            keep="Ids of the experts to keep, instead of statistics: the authors' experts.json, a list, or what "
            '--dry-run --json printed, of which {"kept": {LAYER: [ids]}} is enough.',
            least="Number of experts that each layer keeps at least. Default: 4 under a threshold, else what the "
            "router picks for a token.",
            multiple_of="Keep a multiple of N experts in each layer, which some kernels need (4, 8).",
        ),
    ] = SelectionOptions(),
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
    fit_batch: FitBatchOption = None,
    fit_beam: FitBeamOption = None,
    fit_length: FitLengthOption = None,
    demo: DemoOption = "translation",
    stream: StreamOption = False,
    how: How = How(Path("pruned-experts")),
) -> None:
    """Remove the experts that the given languages or texts need least; no model is built, no shard is held in memory.

    A checkpoint that was pruned before can be pruned further: --ratio counts from what it holds.
    """
    from prunecli.methods.experts.budget import parse_balance
    from prunecli.methods.experts.options import Amount, ExpertOptions, default_ratio, of_language_model
    from prunecli.tensors.quantities import parse_size

    if selection.keep is not None and gates and not constant_experts:
        raise UsageError("--gates and --keep exclude each other.", "Give statistics, or ids.")
    per_layer = None if experts_per_layer is None else _per_layer(experts_per_layer)
    options = selection.of(
        ExpertOptions,
        gates=tuple(gates or (Path("gates.json"),)),
        amount=Amount(selection.ratio, None if fit is None else parse_size(fit), per_layer, selection.count),
        metric=metric,
        strategy=strategy,
        balance=None if balance is None else parse_balance(balance),
        granularity=granularity,
        sources=parse_names("--source", source),
        targets=parse_names("--target", target),
        texts=parse_names("--for", texts),
        min_tokens=min_tokens,
        mtp=mtp,
        active=active,
        constant=constant_experts,
        load=fit_load(fit, fit_batch, fit_beam, fit_length),
    )
    with how.open(checkpoint, demo, stream=stream) as opened:
        from prunecli.methods.experts.budget import explain
        from prunecli.methods.experts.constant import mean_outputs, rewrite_constant
        from prunecli.methods.experts.metrics import WITHOUT_STATISTICS, aimer_bytes
        from prunecli.methods.experts.plan import plan_experts

        if options.keep is None and options.amount == Amount():
            how.note(
                f"No --ratio given: removing at least {100 * default_ratio(opened):.0f}% of the experts."
            )
        if opened.is_remote and (nbytes := aimer_bytes(opened, options)):
            text = console.bytes_text(nbytes)
            how.note(
                f"aimer fetches {text} of experts to choose among them; those that stay are fetched once more."
            )
        plan = plan_experts(opened, options, how.progress)
        how.note(*plan.reasons)
        if plan.warning is not None:
            console.warn(plan.warning)
        named = options.sources + options.targets + options.texts
        if options.keep is None and options.metric not in WITHOUT_STATISTICS and not named:
            files = ", ".join(map(str, options.files))
            what, keep = "languages", "--source and --target keep"
            if of_language_model(opened):
                what, keep = "texts", "--for keeps"
            how.note(f"No {what} named: all of {files} count; {keep} what yours need.")
        rewrite = None
        if options.constant:
            rewrite = rewrite_constant(opened, plan, mean_outputs(opened, options.files, options.texts))
        memory = plan.fit
        how.prune(
            opened,
            plan,
            options.seed,
            rewrite=rewrite,
            table=lambda: None if memory is None else console.out("\n".join(explain(memory))),
        )


def _per_layer(text: str) -> dict[Any, int]:
    """`36,12` -> encoder 36, decoder 12; one number holds for both."""
    numbers = whole_numbers(text)
    if not 1 <= len(numbers) <= 2 or min(numbers) < 0:
        raise UsageError(
            f"--experts-per-layer {text!r} is not ENCODER,DECODER.", "Give two whole numbers, such as 36,12."
        )
    return {"encoder": numbers[0], "decoder": numbers[-1]}
