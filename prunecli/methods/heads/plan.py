"""From a checkpoint, scores and options to a plan: which heads stay. Nothing is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import fsum, sqrt
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from prunecli.choices import Choices
from prunecli.errors import StatisticsError, UsageError
from prunecli.methods.heads.names import HeadMetric, Normalize
from prunecli.model.attention import KINDS, AttentionKind
from prunecli.model.decision import Decision
from prunecli.model.find_axes import axes_of
from prunecli.model.history import given, history_step
from prunecli.model.stock import uniform_heads
from prunecli.results.matching import scores_for
from prunecli.results.unit_scores import Array, Scores, files_of, from_files
from prunecli.selection.given import num_removed, selection_of_file
from prunecli.selection.select import Budget, places_of, select
from prunecli.selection.selection import Selection
from prunecli.text.plain import MIXED

if TYPE_CHECKING:
    from prunecli.model.checkpoint import Checkpoint

COMMAND = "prune-heads"
DEFAULT_RATIO = 0.2
"""What goes without a noticeable loss in both of the paper's models (4.2)."""

DEFAULT_NORMALIZE: dict[str, Normalize] = {"gradient": "per-layer", "ablation": "none"}
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

    scores: Scores | Path | str | Sequence[Path | str] = "heads.json"
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


def plan_heads(checkpoint: Checkpoint, options: HeadOptions) -> Selection:
    """Choose the heads to keep.

    Raises:
        UnsupportedModelError: the family is not declared.
        StatisticsError: damaged files, of another model, or that rank no heads.
        UsageError: options that contradict each other, or that remove more heads than there are.
    """
    if options.ratio is not None and options.count is not None:
        raise UsageError("Give one of --ratio and --count.", "Each says how many heads go.")
    axes = axes_of(checkpoint, "head")
    if options.keep is not None:
        others = (options.ratio is not None, options.count is not None, options.kinds != KINDS, options.least)
        if any(others) or options.uniform or options.normalize is not None:
            raise UsageError(
                "--keep names what stays; it goes with none of --ratio, --count, --attention, --min, --uniform, "
                "--normalize.",
                "Leave them out, or select by --scores.",
            )
        return selection_of_file(COMMAND, checkpoint, axes, Path(options.keep), options.dtype)
    scores, normalize = None, options.normalize or "none"
    files = files_of(options.scores)
    if options.metric == "random":
        generator = np.random.default_rng(options.seed)
        worth = {axis.name: 1.0 - generator.random(axis.original) for axis in axes}
        reasons = [f"Heads of {_where(options)}, drawn at random (seed {options.seed}); no scores are read."]
    else:
        scores = scores_for(checkpoint, options.scores, "head")
        try:
            worth = scores.importance()
        except StatisticsError as error:
            where = f"{files[0]}: " if files else ""
            raise StatisticsError(f"{where}{error.message}", error.remedy) from error
        normalize = options.normalize or DEFAULT_NORMALIZE[scores.method]
        reasons = _reasons(options, normalize, scores)
    if normalize == "per-layer":
        worth = normalized(worth)
    if scores is None:
        values = {axis.name: worth[axis.name][[*axis.ids]] for axis in axes}
    else:
        values = scores.picked(axes, worth)
    ratio = DEFAULT_RATIO if options.ratio is None and options.count is None else options.ratio
    even = _stock_numbers(checkpoint) if options.uniform else None
    present = [*dict.fromkeys(axis.attention for axis in axes)]
    for kind in options.kinds if options.kinds != KINDS else ():
        if kind not in present:
            raise UsageError(
                f"--attention {kind}: the model has no such attention.", f"It has {', '.join(present)}."
            )
    chosen = [axis for axis in axes if axis.attention in options.kinds]
    budget = Budget(ratio, options.count, together=True, least=options.least, even=even)
    kept = {axis.name: axis.ids for axis in axes} | select(chosen, values, budget)
    if even is not None:
        held, gone, asked = (
            sum(len(axis.ids) for axis in chosen),
            num_removed(chosen, kept),
            budget.removed(chosen),
        )
        more = (
            ""
            if gone == asked
            else f"{gone} of {held} heads go ({gone / held:.0%}), {asked} were asked for: "
        )
        where = "layer" if options.kinds == KINDS else f"{' and '.join(options.kinds)} attention"
        each, able = len(kept[chosen[0].name]), ", ".join(map(str, even))
        reasons.append(f"{more}{each} heads stay in every {where}; a stock model may keep {able}.")
    arguments = {
        "ratio": ratio,
        "count": options.count,
        "removed": num_removed(axes, kept),
        "attention": None if options.kinds == KINDS else list(options.kinds),
        "min_per_layer": options.least or None,
        "uniform": options.uniform or None,
        "metric": options.metric,
        "method": None if scores is None else scores.method,
        "normalize": None if scores is None else normalize,
        "seed": options.seed if scores is None else None,
        "dtype": options.dtype,
    }
    step = history_step(COMMAND, checkpoint, given(arguments), () if scores is None else files)
    cut = "" if even else "heads"
    places = (
        places_of(chosen, kept, values, cut=cut, tokens=scores.tokens)
        if scores
        else places_of(chosen, kept, cut=cut)
    )
    decision = Decision("head", places, how=f"drawn at random (seed {options.seed})")
    if scores is not None:
        by = "" if normalize == "none" else ", over the l2 norm of its attention"
        decision = Decision(
            "head",
            places,
            f"importance by {scores.method}{by}",
            "as many stay in every attention" if options.uniform else "the lowest of all attentions go",
            f"every attention keeps {options.least} at least" if options.least else "",
            origin=scores.origin.read_from(step),
        )
    return Selection(kept, options.dtype, step, tuple(reasons), decision)


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


def _where(options: HeadOptions) -> str:
    return "all attentions" if options.kinds == KINDS else f"{', '.join(options.kinds)} attention"


def _reasons(options: HeadOptions, normalize: Normalize, scores: Scores) -> list[str]:
    default = "" if options.normalize else " (default)"
    normalised = "not normalised" if normalize == "none" else f"normalised {normalize}"
    over = f"by {scores.method} over {scores.examples:,} examples"
    lines = [f"Heads of {_where(options)} {over}, {normalised}{default}{from_files(options.scores)}."]
    return [*lines, MIXED] if scores.mixed else lines
