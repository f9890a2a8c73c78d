"""`prunecli prune-heads`: choose the attention heads that matter least, write a checkpoint without them."""

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
    from prunecli.checkpoint.attention import AttentionKind, AttentionLayer
    from prunecli.checkpoint.reader import Checkpoint
    from prunecli.methods.heads.decide import Decision, Options
    from prunecli.pipeline import Rewrite, Summary


class MetricName(str, Enum):
    """Values of --metric."""

    importance = "importance"
    random = "random"


class NormalizeName(str, Enum):
    """Values of --normalize."""

    per_layer = "per-layer"
    none = "none"


class DtypeName(str, Enum):
    """Values of --dtype."""

    float16 = "float16"
    bfloat16 = "bfloat16"
    float32 = "float32"


def prune_heads(
    checkpoint: CheckpointArgument = None,
    scores: Annotated[
        Optional[list[Path]],  # noqa: UP045
        typer.Option(
            "--scores",
            metavar="FILE",
            help="Scores of the checkpoint's heads, or of those of the one that it was pruned from; several of the "
            "gradient method are merged. Default: heads.json.",
            show_default=False,
        ),
    ] = None,
    heads: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            "--heads",
            metavar="FILE",
            help="Ids of the heads to keep, instead of scores: what --dry-run --json printed.",
            show_default=False,
        ),
    ] = None,
    ratio: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(
            "--ratio",
            help="Fraction of the heads to remove, counted from those that the checkpoint holds; never less is "
            "removed. Default: 0.2.",
            show_default=False,
        ),
    ] = None,
    count: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(
            "--count", min=0, metavar="N", help="Heads to remove, instead of --ratio.", show_default=False
        ),
    ] = None,
    attention: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            "--attention",
            metavar="KINDS",
            help="Which attentions may lose heads: encoder, decoder (self-attention), cross, comma-separated; the "
            "ratio counts their heads alone. Default: all.",
            show_default=False,
        ),
    ] = None,
    min_per_layer: Annotated[
        int, typer.Option("--min-per-layer", min=0, metavar="N", help="Heads to keep in each layer at least.")
    ] = 0,
    metric: Annotated[
        MetricName, typer.Option("--metric", help="By their scores, or at random as a baseline.")
    ] = MetricName.importance,
    normalize: Annotated[
        Optional[NormalizeName],  # noqa: UP045
        typer.Option(
            "--normalize",
            help="Divide scores by the l2 norm over their layer, or compare them as they are. Default: per-layer; "
            "none for scores of --method ablation.",
            show_default=False,
        ),
    ] = None,
    dtype: Annotated[
        Optional[DtypeName],  # noqa: UP045
        typer.Option("--dtype", help="Type of the written weights; default: as stored.", show_default=False),
    ] = None,
    seed: SeedOption = 0,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="The pruned checkpoint.")
    ] = Path("pruned-heads"),
    dry_run: DryRunOption = False,
    force: ForceOption = False,
    quiet: QuietOption = False,
    json: JsonOption = False,
) -> None:
    """Remove the attention heads that matter least; no model is built, no shard is held in memory.

    A layer may lose all of its heads. A checkpoint that was pruned before can be pruned further: --ratio counts from
    what it holds.
    """
    from prunecli.checkpoint.reader import open_checkpoint
    from prunecli.methods.heads.decide import Options

    if heads is not None and (scores or metric is MetricName.random):
        raise UsageError("--heads excludes --scores and --metric random.", "Give scores, or ids.")
    options = Options(
        scores=tuple(scores or (Path("heads.json"),)),
        heads=heads,
        ratio=ratio,
        count=count,
        kinds=_kinds(attention),
        minimum=min_per_layer,
        normalize=None if normalize is None else normalize.value,
        metric=metric.value,
        dtype=None if dtype is None else dtype.value,
        seed=seed,
    )
    path = console.demo_checkpoint(checkpoint)
    if not quiet and heads is None and ratio is None and count is None:
        console.note("No --ratio given: removing 20 % of the heads.")
    with open_checkpoint(path) as opened:
        _run(opened, options, None if dry_run else output, force=force, quiet=quiet, json=json)


def _run(
    checkpoint: Checkpoint, options: Options, output: Path | None, *, force: bool, quiet: bool, json: bool
) -> None:
    from prunecli.methods.heads.decide import decide
    from prunecli.methods.heads.rewrite import rewrite
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
    from prunecli.methods.heads.selection import SELECTION_FORMAT

    selection = decision.selection
    return {
        **header(SELECTION_FORMAT, [checkpoint], options.seed),
        "output": None if output is None else str(output),
        "arguments": dict(decision.step["arguments"]),
        "heads_before": selection.count + selection.removed,
        "heads_after": selection.count,
        "parameters_before": summary.parameters_before,
        "parameters_after": summary.parameters_after,
        "bytes_before": summary.bytes_before,
        "bytes_after": summary.bytes_after,
        "kept": {name: list(ids) for name, ids in selection.kept.items()},
    }


def _show(
    checkpoint: Checkpoint, decision: Decision, summary: Summary, made: Rewrite, output: Path | None
) -> None:
    from prunecli.analysis.head_plots import KIND_NAMES
    from prunecli.checkpoint.attention import KINDS, attention_layers

    layers = attention_layers(checkpoint)
    kept = decision.selection.kept
    rows = [[layer.name, *_counts(layer.num_heads, len(kept[layer.name]))] for layer in layers]
    kinds = [kind for kind in KINDS if any(layer.kind == kind for layer in layers)]
    if len(kinds) > 1:
        for kind in kinds:
            own = [layer for layer in layers if layer.kind == kind]
            rows.append([f"all of {KIND_NAMES[kind]}", *_total(own, kept)])
    rows.append(["all attentions", *_total(layers, kept)])
    console.show(console.table("Heads", ("Attention", "Before", "Kept", "Removed"), rows))
    parameters = summary.parameters_before, summary.parameters_after
    console.out(
        f"parameters {parameters[0]:,} -> {parameters[1]:,} ({parameters[1] / parameters[0]:.1%}), "
        f"bytes {console.bytes_text(summary.bytes_before)} -> {console.bytes_text(summary.bytes_after)} "
        f"({summary.bytes_after / summary.bytes_before:.1%})"
    )
    console.out("Dry run: nothing is written." if output is None else f"Written: {output} ({_opens(made)})")


def _total(layers: Sequence[AttentionLayer], kept: Any) -> tuple[str, str, str]:
    return _counts(sum(layer.num_heads for layer in layers), sum(len(kept[layer.name]) for layer in layers))


def _counts(before: int, after: int) -> tuple[str, str, str]:
    return str(before), str(after), f"{1 - after / before:.1%}" if before else "-"


def _opens(made: Rewrite) -> str:
    from prunecli.architectures import REDUCED_PREFIX

    if str(made.config.get("model_type")).startswith(REDUCED_PREFIX):
        return "opens with prunecli, or from_pretrained(…, trust_remote_code=True)"
    return "stock layout"


def _kinds(text: str | None) -> tuple[AttentionKind, ...]:
    """`cross,encoder` -> (encoder, cross); None -> all."""
    from prunecli.checkpoint.attention import KINDS

    if text is None:
        return KINDS
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in KINDS:
            raise UsageError(f"--attention {name!r}: no such kind.", f"Choose from {', '.join(KINDS)}.")
    return tuple(kind for kind in KINDS if kind in names)
