"""From a checkpoint, scores and options to a plan: which heads stay. Nothing is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import fsum, sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from prunecli.choices import Choices, paths
from prunecli.errors import StatisticsError, UsageError
from prunecli.methods.heads.names import HeadMetric, Normalize
from prunecli.model.attention import KINDS, AttentionKind, AttentionLayer
from prunecli.model.axes import Axis
from prunecli.model.decision import Decision, Origin, Ranked
from prunecli.model.find_axes import axes_of
from prunecli.model.history import given, history_step
from prunecli.model.stock import uniform_heads
from prunecli.results.heads import HeadScores, Method, merge, read_scores
from prunecli.results.matching import match_scores, read_matching
from prunecli.selection.saved import read_kept
from prunecli.selection.select import Budget, Kept, places_of, select
from prunecli.selection.selection import Selection
from prunecli.text.plain import MIXED

if TYPE_CHECKING:
    from prunecli.model.checkpoint import Checkpoint

Importance = Mapping[str, Mapping[int, float]]
"""Attention's name -> original id -> importance of the head."""

COMMAND = "prune-heads"
DEFAULT_RATIO = 0.2
"""What goes without a noticeable loss in both of the paper's models (4.2)."""

DEFAULT_NORMALIZE: dict[Method, Normalize] = {"gradient": "per-layer", "ablation": "none"}
"""The paper normalises I_h (4.1), and says nothing of the kind of differences of scores (4.2)."""


@dataclass(frozen=True)
class HeadOptions(Choices):
    """What `prune-heads` is asked.

    Attributes:
        scores: scores, or one file of them or several, merged; not looked at for the metric `random`.
        keep: a saved selection, instead of scores, metric and amount.
        ratio: fraction of the heads of these kinds to remove; with neither it nor `count`: DEFAULT_RATIO.
        count: heads to remove.
        kinds: the kinds of attention that may lose heads.
        least: heads that each of their layers keeps at least.
        uniform: whether every layer keeps the same number of heads, one that a stock model can have.
        normalize: None: DEFAULT_NORMALIZE.
        metric: `importance`, or `random`.
        dtype: type of the result; None: as stored.
        seed: of the metric `random`.
    """

    scores: HeadScores | Path | str | Sequence[Path | str] = "heads.json"
    keep: Path | str | None = None
    ratio: float | None = None
    count: int | None = None
    kinds: tuple[AttentionKind, ...] = KINDS
    least: int = 0
    uniform: bool = False
    normalize: Normalize | None = None
    metric: HeadMetric = "importance"
    dtype: str | None = None
    seed: int = 0

    @property
    def files(self) -> tuple[Path, ...]:
        """The files of scores; none where they are given themselves."""
        return () if isinstance(self.scores, HeadScores) else paths(self.scores)


def plan_heads(checkpoint: Checkpoint, options: HeadOptions) -> Selection:
    """Choose the heads to keep.

    Raises:
        UnsupportedModelError: the family is not declared.
        StatisticsError: damaged files, of another model, or that rank no heads.
        UsageError: options that contradict each other, or that remove more heads than there are.
    """
    if options.ratio is not None and options.count is not None:
        raise UsageError("Give one of --ratio and --count.", "Each says how many heads go.")
    layers = checkpoint.layout.own_attentions
    if options.keep is not None:
        return _from_selection(checkpoint, Path(options.keep), options)
    importance, scores = _importance(checkpoint, options, layers)
    default: Normalize = "none" if scores is None else DEFAULT_NORMALIZE[scores.method]
    ratio = DEFAULT_RATIO if options.ratio is None and options.count is None else options.ratio
    uniform = uniform_heads(checkpoint) if options.uniform else None  # of a stock model
    if uniform == ():
        family = checkpoint.require_architecture()
        why = family.stock_fault or f"a config of type {family.model_type} cannot say how many heads are left"
        raise UsageError(
            f"--uniform: {checkpoint.path} cannot lose heads and be a stock model: {why}.",
            "Remove experts, layers or tokens instead."
            if family.must_be_stock
            else "Leave --uniform out: the result then opens only where prunecli is installed.",
        )
    normalize = options.normalize or default
    axes = axes_of(checkpoint, "head")
    chosen = [axis for axis in axes if axis.attention in options.kinds]
    for kind in options.kinds if options.kinds != KINDS else ():
        if kind not in {axis.attention for axis in axes}:
            present = dict.fromkeys(axis.attention for axis in axes)
            raise UsageError(
                f"--attention {kind}: the model has no such attention.", f"It has {', '.join(present)}."
            )
    budget = Budget(ratio, options.count, together=True, least=options.least, even=uniform)
    worth = normalized(importance) if normalize == "per-layer" else importance
    values = {axis.name: np.array([worth[axis.module][head] for head in axis.ids]) for axis in chosen}
    kept = {axis.name: axis.ids for axis in axes} | select(chosen, values, budget)
    arguments = {
        "ratio": ratio,
        "count": options.count,
        "removed": _removed(axes, kept),
        "attention": None if options.kinds == KINDS else list(options.kinds),
        "min_per_layer": options.least or None,
        "uniform": options.uniform or None,
        "metric": options.metric,
        "method": None if scores is None else scores.method,
        "normalize": None if scores is None else normalize,
        "seed": options.seed if scores is None else None,
        "dtype": options.dtype,
    }
    files = () if scores is None else options.files
    reasons = _reasons(options, normalize, scores)
    if uniform is not None:
        reasons += (_uniformly(chosen, kept, budget, options.kinds),)
    step = history_step(COMMAND, checkpoint, given(arguments), files)
    compared = None if scores is None else values
    places = places_of(chosen, kept, compared, cut="" if uniform else "heads")
    return Selection(kept, options.dtype, step, reasons, _decision(places, options, normalize, scores, step))


def _decision(
    places: tuple[Ranked, ...],
    options: HeadOptions,
    normalize: Normalize,
    scores: HeadScores | None,
    step: Mapping[str, Any],
) -> Decision:
    if scores is None:
        return Decision("head", places, how=f"drawn at random (seed {options.seed})")
    by = "" if normalize == "none" else ", over the l2 norm of its attention"
    origin = Origin(texts=scores.texts, split=scores.split, sentences=scores.examples)
    return Decision(
        "head",
        tuple(replace(place, tokens=scores.tokens.get(place.module)) for place in places),
        f"importance by {scores.method}{by}",
        "as many stay in every attention" if options.uniform else "the lowest of all attentions go",
        f"every attention keeps {options.least} at least" if options.least else "",
        origin=origin.read_from(step),
    )


def _removed(axes: Sequence[Axis], kept: Kept) -> int:
    return sum(len(axis.ids) - len(kept[axis.name]) for axis in axes)


def _uniformly(axes: Sequence[Axis], kept: Kept, budget: Budget, kinds: Sequence[AttentionKind]) -> str:
    """How many stay, and how many go where that is more than was asked for."""
    held, gone, asked = sum(len(axis.ids) for axis in axes), _removed(axes, kept), budget.removed(axes)
    more = "" if gone == asked else f"{gone} of {held} heads go ({gone / held:.0%}), {asked} were asked for: "
    where = "layer" if kinds == KINDS else f"{' and '.join(kinds)} attention"
    each, able = len(kept[axes[0].name]), ", ".join(map(str, budget.even or ()))
    return f"{more}{each} heads stay in every {where}; a stock model may keep {able}."


def _from_selection(checkpoint: Checkpoint, path: Path, options: HeadOptions) -> Selection:
    others = (options.ratio is not None, options.count is not None, options.kinds != KINDS, options.least)
    if any(others) or options.uniform or options.normalize is not None:
        raise UsageError(
            "--keep names what stays; it goes with none of --ratio, --count, --attention, --min, --uniform, "
            "--normalize.",
            "Leave them out, or select by --scores.",
        )
    axes = axes_of(checkpoint, "head")
    kept = read_kept(path, axes)
    step = history_step(
        COMMAND, checkpoint, given({"removed": _removed(axes, kept), "dtype": options.dtype}), (path,)
    )
    places = places_of(axes, kept, cut="heads")
    named = Decision("head", places, how=f"named in {path.name}", origin=Origin().read_from(step))
    return Selection(kept, options.dtype, step, (f"Heads by {path}.",), named)


def normalized(importance: Importance) -> dict[str, dict[int, float]]:
    """I_h / sqrt(sum_h' I_h'^2) within each layer (4.1), over all heads that were scored; zeros stay zeros.

    Heads that a checkpoint no longer holds count in the norm, so that pruning in steps by the scores of the original
    removes the same heads as pruning at once.
    """
    found = {}
    for name, values in importance.items():
        # Relative to the largest first: squares of small gradients would vanish, and equal layers stay equal.
        largest = max((abs(value) for value in values.values()), default=0.0) or 1.0
        relative = {head: value / largest for head, value in values.items()}
        norm = sqrt(fsum(value**2 for value in relative.values())) or 1.0
        found[name] = {head: value / norm for head, value in relative.items()}
    return found


def _importance(
    checkpoint: Checkpoint, options: HeadOptions, layers: Sequence[AttentionLayer]
) -> tuple[Importance, HeadScores | None]:
    if options.metric == "random":
        generator = np.random.default_rng(options.seed)
        return {
            layer.name: dict(enumerate((1.0 - generator.random(layer.original_heads)).tolist()))
            for layer in layers
        }, None
    if isinstance(options.scores, HeadScores):
        scores = match_scores(options.scores, checkpoint, layers)
        return scores.importance(), scores
    scores = read_all(checkpoint, options.files, layers)
    try:
        return scores.importance(), scores
    except StatisticsError as error:
        raise StatisticsError(f"{options.files[0]}: {error.message}", error.remedy) from error


def read_all(
    checkpoint: Checkpoint, paths: Sequence[Path], layers: Sequence[AttentionLayer] | None = None
) -> HeadScores:
    """The scores of several files, merged, of this checkpoint or of one that it was made from.

    Raises:
        StatisticsError: damaged files, of another model, or that do not go together.
    """
    layers = checkpoint.layout.own_attentions if layers is None else layers
    parts = read_matching(
        paths,
        read_scores,
        lambda scores: match_scores(scores, checkpoint, layers),
        "Score the heads first: prunecli score-heads.",
    )
    return merge(parts, [str(path) for path in paths])


def _reasons(options: HeadOptions, normalize: Normalize, scores: HeadScores | None) -> tuple[str, ...]:
    of = "all attentions" if options.kinds == KINDS else f"{', '.join(options.kinds)} attention"
    if scores is None:
        return (f"Heads of {of}, drawn at random (seed {options.seed}); no scores are read.",)
    default = "" if options.normalize else " (default)"
    normalised = "not normalised" if normalize == "none" else f"normalised {normalize}"
    where = f", from {', '.join(map(str, options.files))}" if options.files else ""
    chosen = (
        f"Heads of {of} by {scores.method} over {scores.examples:,} examples, {normalised}{default}{where}."
    )
    return (chosen, MIXED) if scores.mixed else (chosen,)
