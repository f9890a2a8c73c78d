"""`prunecli prune-heads`: choose the attention heads that matter least, write a checkpoint without them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prunecli.commands.groups import flattened
from prunecli.commands.options import (
    CheckpointArgument,
    DtypeOption,
    SeedOption,
)
from prunecli.commands.rewriting import How
from prunecli.errors import UsageError
from prunecli.methods.heads.names import HeadMetric, Normalize
from prunecli.tensors.quantities import parse_share

if TYPE_CHECKING:
    from prunecli.model.attention import AttentionKind


@flattened
def prune_heads(
    checkpoint: CheckpointArgument = None,
    scores: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="Scores of the checkpoint's heads, or of those of the one that it was pruned from; several of the "
            "gradient method are merged. Default: heads.json.",
        ),
    ] = None,
    heads: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Ids of the heads to keep, instead of scores: what --dry-run --json printed.",
        ),
    ] = None,
    ratio: Annotated[
        float | None,
        typer.Option(
            parser=parse_share,
            metavar="R",
            help="Fraction of the heads to remove, counted from those that the checkpoint holds; never less is "
            "removed. Default: 0.2.",
        ),
    ] = None,
    count: Annotated[
        int | None,
        typer.Option(min=0, help="Heads to remove, instead of --ratio."),
    ] = None,
    attention: Annotated[
        str | None,
        typer.Option(
            metavar="KINDS",
            help="Which attentions may lose heads: encoder, decoder (self-attention), cross, comma-separated; the "
            "ratio counts their heads alone. Default: all.",
        ),
    ] = None,
    min_per_layer: Annotated[int, typer.Option(min=0, help="Heads to keep in each layer at least.")] = 0,
    uniform: Annotated[
        bool,
        typer.Option(
            "--uniform",
            help="The same number of heads in every layer, as many as a stock config can hold and --ratio or --count "
            "lets stay: plain transformers opens the result.",
        ),
    ] = False,
    metric: Annotated[
        HeadMetric, typer.Option(help="By their scores, or at random as a baseline.")
    ] = "importance",
    normalize: Annotated[
        Normalize | None,
        typer.Option(
            help="Divide scores by the l2 norm over their layer, or compare them as they are. Default: per-layer; "
            "none for scores of --method ablation.",
        ),
    ] = None,
    dtype: DtypeOption = None,
    seed: SeedOption = 0,
    how: How = How(Path("pruned-heads")),
) -> None:
    """Remove the attention heads that matter least; no model is built, no shard is held in memory.

    A layer may lose all of its heads. A checkpoint that was pruned before can be pruned further: --ratio counts from
    what it holds.
    """
    from prunecli.methods.heads.plan import HeadOptions, plan_heads
    from prunecli.selection.cut import cut

    if heads is not None and (scores or metric == "random"):
        raise UsageError("--heads excludes --scores and --metric random.", "Give scores, or ids.")
    options = HeadOptions(
        scores=tuple(scores or (Path("heads.json"),)),
        heads=heads,
        ratio=ratio,
        count=count,
        kinds=_kinds(attention),
        minimum=min_per_layer,
        uniform=uniform,
        normalize=normalize,
        metric=metric,
        dtype=dtype,
        seed=seed,
    )
    with how.open(checkpoint) as opened:
        if heads is None and ratio is None and count is None:
            how.note("No --ratio given: removing 20% of the heads.")
        plan = plan_heads(opened, options)
        how.note(*plan.reasons)
        shown = how.apply(opened, cut(opened, plan))
        how.show(lambda: shown.selected(plan, seed), lambda: shown.show_selected(plan))


def _kinds(text: str | None) -> tuple[AttentionKind, ...]:
    """`cross,encoder` -> (encoder, cross); None -> all."""
    from prunecli.model.attention import KINDS

    if text is None:
        return KINDS
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in KINDS:
            raise UsageError(f"--attention {name!r}: no such kind.", f"Choose from {', '.join(KINDS)}.")
    return tuple(kind for kind in KINDS if kind in names)
