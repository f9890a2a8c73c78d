"""`prunecli prune-experts`: choose the experts that some languages need, write a checkpoint with those."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from prunecli.commands import console
from prunecli.commands.options import (
    CheckpointArgument,
    DryRunOption,
    ForceOption,
    JsonOption,
    QuietOption,
    SeedOption,
)
from prunecli.errors import UsageError

if TYPE_CHECKING:
    from prunecli.checkpoint.reader import Checkpoint
    from prunecli.methods.experts.decide import Decision, Options
    from prunecli.pipeline import Rewrite, Summary


class MetricName(str, Enum):
    """Values of --metric."""

    importance = "importance"
    importance_vanilla = "importance-vanilla"
    top1 = "top1"
    top2 = "top2"
    load_balance = "load-balance"
    random = "random"


class StrategyName(str, Enum):
    """Values of --strategy."""

    per_layer = "per-layer"
    global_threshold = "global-threshold"
    side_threshold = "side-threshold"


class GranularityName(str, Enum):
    """Values of --granularity."""

    language = "language"
    pair = "pair"
    everything = "global"


class DtypeName(str, Enum):
    """Values of --dtype."""

    float16 = "float16"
    bfloat16 = "bfloat16"
    float32 = "float32"


def prune_experts(
    checkpoint: CheckpointArgument = None,
    gates: Annotated[
        Optional[list[Path]],  # noqa: UP045
        typer.Option(
            "--gates",
            metavar="FILE",
            help="Gate statistics of the checkpoint, or of the one that it was pruned from; several are "
            "merged. The authors' published files work too. Default: gates.json.",
            show_default=False,
        ),
    ] = None,
    experts: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            "--experts",
            metavar="FILE",
            help="Ids of the experts to keep, instead of statistics: the authors' experts.json, a list, or "
            "what --dry-run --json printed.",
            show_default=False,
        ),
    ] = None,
    ratio: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(
            "--ratio",
            help="Fraction of the experts to remove, counted from those that the checkpoint holds; never "
            "less is removed. Default: 0.8.",
            show_default=False,
        ),
    ] = None,
    fit: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            "--fit",
            metavar="SIZE",
            help="Remove as few experts as fit in this memory (30GiB) while it decodes the load of the other "
            "--fit options, with 10 % left free.",
            show_default=False,
        ),
    ] = None,
    experts_per_layer: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            "--experts-per-layer",
            metavar="ENC,DEC",
            help="Experts to keep in each encoder and decoder layer: 36,12.",
            show_default=False,
        ),
    ] = None,
    metric: Annotated[
        MetricName,
        typer.Option("--metric", help="What makes an expert important; random is a baseline."),
    ] = MetricName.importance,
    strategy: Annotated[
        StrategyName,
        typer.Option("--strategy", help="Fixed per layer, or a threshold for the model or for each side."),
    ] = StrategyName.per_layer,
    balance: Annotated[
        str, typer.Option("--balance", metavar="ENC:DEC", help="Encoder experts kept per decoder expert.")
    ] = "3:1",
    min_per_layer: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(
            "--min-per-layer",
            min=1,
            metavar="N",
            help="Experts to keep in each layer at least; default: 4 under a threshold, else what the "
            "router picks for a token.",
            show_default=False,
        ),
    ] = None,
    granularity: Annotated[
        Optional[GranularityName],  # noqa: UP045
        typer.Option(
            "--granularity",
            help="Which statistics are summed: the encoder's by source and the decoder's by target, those of "
            "the pairs, or all. Default: language where --source or --target is given, else global.",
            show_default=False,
        ),
    ] = None,
    source: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--source", metavar="A,B", help="Languages to translate from.", show_default=False),
    ] = None,
    target: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--target", metavar="C,D", help="Languages to translate into.", show_default=False),
    ] = None,
    dtype: Annotated[
        Optional[DtypeName],  # noqa: UP045
        typer.Option("--dtype", help="Type of the written weights; default: as stored.", show_default=False),
    ] = None,
    fit_batch: Annotated[int, typer.Option("--fit-batch", min=1, help="Sentences decoded at a time.")] = 1,
    fit_beam: Annotated[int, typer.Option("--fit-beam", min=1, help="Beam size.")] = 4,
    fit_length: Annotated[int, typer.Option("--fit-length", min=1, help="Tokens of a sentence.")] = 128,
    seed: SeedOption = 0,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="The pruned checkpoint.")
    ] = Path("pruned-experts"),
    dry_run: DryRunOption = False,
    force: ForceOption = False,
    quiet: QuietOption = False,
    json: JsonOption = False,
) -> None:
    """Remove the experts that the given languages need least; no model is built, no shard is held in memory.

    A checkpoint that was pruned before can be pruned further: --ratio counts from what it holds.
    """
    from prunecli.checkpoint.dtypes import parse_size
    from prunecli.checkpoint.reader import open_checkpoint
    from prunecli.methods.experts.budget import parse_balance
    from prunecli.methods.experts.decide import Amount, Options

    if experts is not None and gates:
        raise UsageError("--gates and --experts exclude each other.", "Give statistics, or ids.")
    per_layer = None if experts_per_layer is None else _per_layer(experts_per_layer)
    options = Options(
        gates=tuple(gates or (Path("gates.json"),)),
        experts=experts,
        amount=Amount(ratio, None if fit is None else parse_size(fit), per_layer),
        metric=metric.value,
        strategy=strategy.value,
        balance=parse_balance(balance),
        minimum=min_per_layer,
        granularity=None if granularity is None else granularity.value,
        sources=_names("--source", source),
        targets=_names("--target", target),
        dtype=None if dtype is None else dtype.value,
        seed=seed,
        load={"batch": fit_batch, "beam": fit_beam, "length": fit_length},
    )
    path = console.demo_checkpoint(checkpoint)
    if not quiet and options.experts is None and options.amount == Amount():
        console.note("No --ratio given: removing 80 % of the experts.")
    with open_checkpoint(path) as opened:
        _run(opened, options, None if dry_run else output, force=force, quiet=quiet, json=json)


def _run(
    checkpoint: Checkpoint, options: Options, output: Path | None, *, force: bool, quiet: bool, json: bool
) -> None:
    from prunecli.methods.experts.decide import decide
    from prunecli.methods.experts.rewrite import rewrite
    from prunecli.pipeline import Rewrite, rewrite_checkpoint, stock_config, summarize

    decision = decide(checkpoint, options)
    if not quiet:
        for reason in decision.reasons:
            console.note(reason)
    structure, outputs = rewrite(checkpoint, decision.selection.kept, options.dtype)
    structure = structure.after(decision.step)
    made = Rewrite(structure, outputs, stock_config(checkpoint, structure))
    if output is None:
        summary = summarize(checkpoint, made)
    else:
        summary = rewrite_checkpoint(
            checkpoint, made, output, force=force, progress=console.progress(quiet or json)
        )
    if json:
        console.print_json(_payload(checkpoint, decision, summary, options, output))
    elif not quiet:
        _show(checkpoint, decision, summary, made, output)


def _payload(
    checkpoint: Checkpoint, decision: Decision, summary: Summary, options: Options, output: Path | None
) -> dict[str, Any]:
    from prunecli.checkpoint.documents import header
    from prunecli.checkpoint.layout import sparse_layers
    from prunecli.methods.experts.fit import fit_payload
    from prunecli.methods.experts.published import SELECTION_FORMAT

    return {
        **header(SELECTION_FORMAT, [checkpoint], options.seed),
        "output": None if output is None else str(output),
        "arguments": dict(decision.step["arguments"]),
        "experts_before": sum(layer.num_experts for layer in sparse_layers(checkpoint)),
        "experts_after": decision.selection.count,
        "parameters_before": summary.parameters_before,
        "parameters_after": summary.parameters_after,
        "bytes_before": summary.bytes_before,
        "bytes_after": summary.bytes_after,
        "thresholds": dict(decision.selection.thresholds),
        **({} if decision.fit is None else {"fit": fit_payload(decision.fit)}),
        "kept": {layer: list(ids) for layer, ids in decision.selection.kept.items()},
    }


def _show(
    checkpoint: Checkpoint, decision: Decision, summary: Summary, made: Rewrite, output: Path | None
) -> None:
    from prunecli.checkpoint.layout import sparse_layers
    from prunecli.methods.experts.fit import explain

    layers = sparse_layers(checkpoint)
    kept = decision.selection.kept
    rows = [[layer.name, *_counts(layer.num_experts, len(kept[layer.name]))] for layer in layers]
    held = sum(layer.num_experts for layer in layers)
    rows.append(["all sparse layers", *_counts(held, decision.selection.count)])
    console.show(console.table("Experts", ("Layer", "Before", "Kept", "Removed"), rows))
    if decision.fit is not None:
        for line in explain(decision.fit):
            console.out(line)
    parameters = summary.parameters_before, summary.parameters_after
    console.out(
        f"parameters {parameters[0]:,} -> {parameters[1]:,} ({parameters[1] / parameters[0]:.1%}), "
        f"bytes {console.bytes_text(summary.bytes_before)} -> {console.bytes_text(summary.bytes_after)} "
        f"({summary.bytes_after / summary.bytes_before:.1%})"
    )
    console.out("Dry run: nothing is written." if output is None else f"Written: {output} ({_opens(made)})")


def _counts(before: int, after: int) -> tuple[str, str, str]:
    return str(before), str(after), f"{1 - after / before:.1%}"


def _opens(made: Rewrite) -> str:
    from prunecli.architectures import REDUCED_PREFIX

    if str(made.config.get("model_type")).startswith(REDUCED_PREFIX):
        return "opens with prunecli, or from_pretrained(…, trust_remote_code=True)"
    return "stock layout"


def _names(option: str, text: str | None) -> tuple[str, ...]:
    """`a, b` -> (a, b), each once."""
    if text is None:
        return ()
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    if not all(names):
        raise UsageError(f"{option} {text!r}: an empty name.", "Separate languages by single commas.")
    return names


def _per_layer(text: str) -> dict[Any, int]:
    """`36,12` -> encoder 36, decoder 12; one number holds for both."""
    parts: Sequence[str] = [part.strip() for part in text.split(",")]
    if len(parts) not in (1, 2) or not all(part.isdecimal() for part in parts):
        raise UsageError(
            f"--experts-per-layer {text!r} is not ENCODER,DECODER.", "Give two whole numbers, such as 36,12."
        )
    return {"encoder": int(parts[0]), "decoder": int(parts[-1])}
