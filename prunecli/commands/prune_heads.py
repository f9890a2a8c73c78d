"""`prunecli prune-heads`: choose the attention heads that matter least, write a checkpoint without them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prunecli.commands.groups import Helps, Without, flattened
from prunecli.commands.options import CheckpointArgument, SelectionOptions
from prunecli.commands.rewriting import How
from prunecli.errors import UsageError
from prunecli.methods.names import HeadMetric, Normalize

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
    selection: Annotated[
        SelectionOptions,
        Without({"multiple_of"}),
        Helps(
            ratio="Fraction of the heads to remove, of those that the checkpoint holds; rounded up. Default: 0.2.",
            count="Number of heads to remove, instead of --ratio.",
            keep="Ids of the heads to keep, instead of scores: what --dry-run --json printed.",
            least="Number of heads that each layer keeps at least.",
            uniform="Keep the same number of heads in every layer, the largest that a stock config can hold and "
            "--ratio or --count allows: plain transformers opens the result. Default: uneven.",
        ),
    ] = SelectionOptions(least=0),
    attention: Annotated[
        str | None,
        typer.Option(
            metavar="KINDS",
            help="Which attentions may lose heads: encoder, decoder (self-attention), cross, comma-separated; the "
            "ratio counts their heads alone. Default: all.",
        ),
    ] = None,
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
    how: How = How(Path("pruned-heads")),
) -> None:
    """Remove the attention heads that matter least; no model is built, no shard is held in memory.

    A layer may lose all of its heads. A checkpoint that was pruned before can be pruned further: --ratio counts from
    what it holds.
    """
    from prunecli.methods.heads.plan import HeadOptions, plan_heads

    if selection.keep is not None and (scores or metric == "random"):
        raise UsageError("--keep excludes --scores and --metric random.", "Give scores, or ids.")
    options = selection.of(
        HeadOptions,
        scores=tuple(scores or (Path("heads.json"),)),
        kinds=_kinds(attention),
        normalize=normalize,
        metric=metric,
    )
    with how.open(checkpoint) as opened:
        plan = plan_heads(opened, options)
        how.note(*plan.reasons)
        how.prune(opened, plan, options.seed)


def _kinds(text: str | None) -> tuple[AttentionKind, ...]:
    """`cross,encoder` -> (encoder, cross); None -> all."""
    from prunecli.model.attention import KINDS

    if text is None:
        return KINDS
    names = [name.strip() for name in text.split(",")]
    for name in (name for name in names if name not in KINDS):
        raise UsageError(f"--attention {name!r}: no such kind.", f"Choose from {', '.join(KINDS)}.")
    return tuple(kind for kind in KINDS if kind in names)
