"""Choose the attention heads to keep, from scores (1905.10650, 4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import fsum, sqrt
from pathlib import Path
from typing import ClassVar

import numpy as np

from prunecli.errors import StatisticsError, UsageError
from prunecli.methods.names import HeadMetric, Normalize
from prunecli.methods.units import Ranking, UnitOptions, by_scores, plan, random_words
from prunecli.model.attention import KINDS, AttentionKind
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.find_axes import axes_of
from prunecli.model.stock import uniform_heads
from prunecli.results.matching import scores_for
from prunecli.results.unit_scores import Array, Kind, Scores, files_of
from prunecli.selection.select import Budget
from prunecli.selection.selection import Selection, selection_of_file

DEFAULT_NORMALIZE: dict[str, Normalize] = {"gradient": "per-layer", "ablation": "none"}
"""The paper normalises I_h (4.1), and says nothing of the kind of differences of scores (4.2)."""


@dataclass(frozen=True)
class HeadOptions(UnitOptions):
    """Options of `prune-heads`.

    Attributes:
        ratio: fraction of the heads to remove, rounded up. If None and no count is given, `DEFAULT_RATIO`.
        count: number of heads to remove.
        keep: a saved selection, instead of scores, metric and amount.
        scores: scores, or one file of them or several, merged; not read for the metric `random`.
        kinds: the kinds of attention that may lose heads; the amount counts their heads alone.
        least: number of heads that each of their layers keeps at least.
        uniform: whether every layer keeps the same number of heads, one that a stock model can have.
        normalize: how scores of different layers are compared. If None, `DEFAULT_NORMALIZE`.
        metric: `importance`, or `random`.
        dtype: type of the result's weights. If None, as stored.
        seed: seed of the metric `random`.
    """

    COMMAND = "prune-heads"
    KIND: ClassVar[Kind] = "head"
    UNITS = "heads"
    DEFAULT_RATIO = 0.2
    """The paper removes 20 % without a noticeable loss in both of its models (4.2)."""

    scores: Scores | Path | str | Sequence[Path | str] = "heads.json"
    kinds: tuple[AttentionKind, ...] = KINDS
    least: int = 0
    uniform: bool = False
    normalize: Normalize | None = None
    metric: HeadMetric = "importance"


def plan_heads(checkpoint: Checkpoint, options: HeadOptions) -> Selection:
    """Choose the heads to keep.

    Raises:
        UnsupportedModelError: the family is not declared.
        StatisticsError: damaged files, of another model, or that rank no heads.
        UsageError: options that contradict each other, or that remove more heads than there are.
    """
    options.check_amount()
    axes = axes_of(checkpoint, "head")
    if options.keep is not None:
        if options.changed - {"keep", "scores", "metric", "dtype", "seed"}:
            raise UsageError(
                "--keep names what stays; it goes with none of --ratio, --count, --attention, --min, --uniform, "
                "--normalize.",
                "Leave them out, or select by --scores.",
            )
        return selection_of_file(options.COMMAND, checkpoint, axes, Path(options.keep), options.dtype)
    is_all = options.kinds == KINDS
    present = [*dict.fromkeys(axis.attention for axis in axes)]
    for kind in () if is_all else options.kinds:
        if kind not in present:
            raise UsageError(
                f"--attention {kind}: the model has no such attention.", f"It has {', '.join(present)}."
            )
    chosen = [axis for axis in axes if axis.attention in options.kinds]
    even = _stock_numbers(checkpoint) if options.uniform else None
    budget = Budget(options.share, options.count, scope="model", least=options.least, even=even)
    normalize, method = options.normalize or "none", None
    if options.metric == "random":
        generator = np.random.default_rng(options.seed)
        # One number for each head of the original model: pruning in steps removes the same heads as pruning at once.
        worth = {axis.name: 1.0 - generator.random(axis.original) for axis in axes}
        own = normalized(worth) if normalize == "per-layer" else worth
        values = {axis.name: own[axis.name][[*axis.ids]] for axis in axes}
        ranking = Ranking(values, how=random_words(options.seed))
    else:
        scores = scores_for(checkpoint, options.scores, "head")
        try:
            worth = scores.importance()
        except StatisticsError as error:
            files = "".join(f"{path}: " for path in files_of(options.scores)[:1])
            raise StatisticsError(f"{files}{error.message}", error.remedy) from error
        normalize = options.normalize or DEFAULT_NORMALIZE[scores.method]
        own = normalized(worth) if normalize == "per-layer" else worth
        by = "" if normalize == "none" else ", over the l2 norm of its attention"
        shown = f"importance by {scores.method}{by}"
        method = scores.method
        normalised = "not normalised" if normalize == "none" else f"normalised {normalize}"
        default = "" if options.normalize else " (default)"
        ranking = replace(
            by_scores(scores, scores.picked(axes, own), options, scores.method, shown),
            note=f" over {scores.examples:,} examples, {normalised}{default}",
        )
    arguments = {
        "ratio": options.share,
        "count": options.count,
        "removed": None,
        "attention": None if is_all else list(options.kinds),
        "min_per_layer": options.least or None,
        "uniform": options.uniform or None,
        "metric": options.metric,
        "method": method,
        "normalize": normalize if method else None,
    }
    of = " of all attentions" if is_all else f" of {', '.join(options.kinds)} attention"
    return plan(checkpoint, options, axes, budget, ranking, arguments, chosen=chosen, of=of)


def _stock_numbers(checkpoint: Checkpoint) -> tuple[int, ...]:
    """Numbers of heads that every layer of a stock model may keep.

    Raises:
        UsageError: the family's config cannot say a smaller number.
    """
    if numbers := uniform_heads(checkpoint):
        return numbers
    family = checkpoint.require_architecture()
    why = family.stock_fault or f"a config of type {family.model_type} cannot say how many heads are left"
    raise UsageError(
        f"--uniform: {checkpoint.path} cannot lose heads and be a stock model: {why}.",
        "Remove experts, layers or tokens instead."
        if family.must_be_stock
        else "Leave --uniform out: the result then opens only where prunecli is installed.",
    )


def normalized(importance: Mapping[str, Array]) -> dict[str, Array]:
    """I_h / sqrt(sum_h' I_h'^2) within each layer (4.1), over all heads that were scored; zeros stay zeros.

    Heads that a checkpoint no longer holds count in the norm, so that pruning in steps by the scores of the original
    removes the same heads as pruning at once.
    """
    found = {}
    for name, values in importance.items():
        # Relative to the largest first: squares of small gradients would vanish, and equal layers stay equal.
        relative = values / (np.abs(values).max(initial=0.0) or 1.0)
        found[name] = relative / (sqrt(fsum(np.square(relative))) or 1.0)
    return found
