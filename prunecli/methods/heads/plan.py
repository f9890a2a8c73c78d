"""From a checkpoint, scores and options to a plan: which heads stay. Nothing is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prunecli.choices import Choices, paths
from prunecli.errors import StatisticsError, UsageError
from prunecli.methods.heads.names import HeadMetric, Normalize
from prunecli.methods.heads.select import (
    Importance,
    Request,
    random_importance,
    ranked_heads,
    removed_count,
    select_heads,
)
from prunecli.model.attention import KINDS, AttentionKind, AttentionLayer
from prunecli.model.axes import axes_of
from prunecli.model.decision import Decision, Origin, Ranked
from prunecli.model.history import given, history_step
from prunecli.model.stock import uniform_heads
from prunecli.results.head_matching import check_matches, merge, numbered
from prunecli.results.heads import HeadScores, Method, read_scores
from prunecli.selection.saved import read_kept
from prunecli.selection.selection import Selection
from prunecli.text.plain import MIXED

if TYPE_CHECKING:
    from prunecli.model.checkpoint import Checkpoint

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
        heads: a saved selection, instead of scores, metric and amount.
        ratio: fraction of the heads of these kinds to remove; with neither it nor `count`: DEFAULT_RATIO.
        count: heads to remove.
        kinds: the kinds of attention that may lose heads.
        minimum: heads that each of their layers keeps at least.
        uniform: whether every layer keeps the same number of heads, one that a stock model can have.
        normalize: None: DEFAULT_NORMALIZE.
        metric: `importance`, or `random`.
        dtype: type of the result; None: as stored.
        seed: of the metric `random`.
    """

    scores: HeadScores | Path | str | Sequence[Path | str] = "heads.json"
    heads: Path | str | None = None
    ratio: float | None = None
    count: int | None = None
    kinds: tuple[AttentionKind, ...] = KINDS
    minimum: int = 0
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
    if options.heads is not None:
        return _from_selection(checkpoint, Path(options.heads), options, layers)
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
    request = Request(
        ratio, options.count, options.kinds, options.minimum, options.normalize or default, uniform
    )
    kept = select_heads(layers, importance, request)
    arguments = {
        "ratio": ratio,
        "count": options.count,
        "removed": _removed(layers, kept),
        "attention": None if options.kinds == KINDS else list(options.kinds),
        "min_per_layer": options.minimum or None,
        "uniform": options.uniform or None,
        "metric": options.metric,
        "method": None if scores is None else scores.method,
        "normalize": None if scores is None else request.normalize,
        "seed": options.seed if scores is None else None,
        "dtype": options.dtype,
    }
    files = () if scores is None else options.files
    reasons = _reasons(options, request, scores)
    if uniform is not None:
        reasons += (_uniformly(layers, kept, uniform, request),)
    step = history_step(COMMAND, checkpoint, given(arguments), files)
    places = ranked_heads(layers, None if scores is None else importance, request, kept)
    decision = _decision(places, options, request, scores, step)
    by_axis = {f"{name}.heads": ids for name, ids in kept.items()}
    return Selection(by_axis, options.dtype, step, reasons, decision)


def _decision(
    places: tuple[Ranked, ...],
    options: HeadOptions,
    request: Request,
    scores: HeadScores | None,
    step: Mapping[str, Any],
) -> Decision:
    if scores is None:
        return Decision("head", places, how=f"drawn at random (seed {options.seed})")
    by = "" if request.normalize == "none" else ", over the l2 norm of its attention"
    origin = Origin(texts=scores.texts, split=scores.split, sentences=scores.examples)
    return Decision(
        "head",
        tuple(replace(place, tokens=scores.tokens.get(place.name)) for place in places),
        f"importance by {scores.method}{by}",
        "as many stay in every attention" if options.uniform else "the lowest of all attentions go",
        f"every attention keeps {request.minimum} at least" if request.minimum else "",
        origin=origin.read_from(step),
    )


def _removed(layers: Sequence[AttentionLayer], kept: Mapping[str, Sequence[int]]) -> int:
    return sum(layer.num_heads - len(kept[layer.name]) for layer in layers)


def _uniformly(
    layers: Sequence[AttentionLayer], kept: Mapping[str, Sequence[int]], able: Sequence[int], request: Request
) -> str:
    """How many stay, and how many go where that is more than was asked for."""
    chosen = [layer for layer in layers if layer.kind in request.kinds]
    held = sum(len(layer.heads) for layer in chosen)
    gone = _removed(layers, kept)
    asked = request.count if request.ratio is None else removed_count(request.ratio, held)
    more = "" if gone == asked else f"{gone} of {held} heads go ({gone / held:.0%}), {asked} were asked for: "
    each = min(len(kept[layer.name]) for layer in chosen)
    where = "layer" if request.kinds == KINDS else f"{' and '.join(request.kinds)} attention"
    return f"{more}{each} heads stay in every {where}; a stock model may keep {', '.join(map(str, able))}."


def _from_selection(
    checkpoint: Checkpoint, path: Path, options: HeadOptions, layers: Sequence[AttentionLayer]
) -> Selection:
    others = (options.ratio is not None, options.count is not None, options.kinds != KINDS, options.minimum)
    if any(others) or options.uniform or options.normalize is not None:
        raise UsageError(
            "--heads names what stays; it goes with none of --ratio, --count, --attention, --min-per-layer, --uniform, "
            "--normalize.",
            "Leave them out, or select by --scores.",
        )
    by_axis = read_kept(path, axes_of(checkpoint, "head"))
    kept = {name.removesuffix(".heads"): ids for name, ids in by_axis.items()}
    arguments = {"removed": _removed(layers, kept), "dtype": options.dtype}
    step = history_step(COMMAND, checkpoint, given(arguments), (path,))
    places = ranked_heads(layers, None, Request(), kept)
    named = Decision("head", places, how=f"named in {path.name}", origin=Origin().read_from(step))
    return Selection(by_axis, options.dtype, step, (f"Heads by {path}.",), named)


def _importance(
    checkpoint: Checkpoint, options: HeadOptions, layers: Sequence[AttentionLayer]
) -> tuple[Importance, HeadScores | None]:
    if options.metric == "random":
        return random_importance({layer.name: layer.original_heads for layer in layers}, options.seed), None
    if isinstance(options.scores, HeadScores):
        scores = numbered(options.scores, checkpoint)
        check_matches(scores, checkpoint, layers)
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
    parts = []
    for path in paths:
        if not path.exists():
            raise StatisticsError(f"{path}: no such file", "Score the heads first: prunecli score-heads.")
        parts.append(numbered(read_scores(path), checkpoint))
        try:
            check_matches(parts[-1], checkpoint, layers)
        except StatisticsError as error:
            raise StatisticsError(f"{path}: {error.message}", error.remedy) from error
    return merge(parts, [str(path) for path in paths])


def _reasons(options: HeadOptions, request: Request, scores: HeadScores | None) -> tuple[str, ...]:
    of = "all attentions" if request.kinds == KINDS else f"{', '.join(request.kinds)} attention"
    if scores is None:
        return (f"Heads of {of}, drawn at random (seed {options.seed}); no scores are read.",)
    default = "" if options.normalize else " (default)"
    normalised = "not normalised" if request.normalize == "none" else f"normalised {request.normalize}"
    where = f", from {', '.join(map(str, options.files))}" if options.files else ""
    chosen = (
        f"Heads of {of} by {scores.method} over {scores.examples:,} examples, {normalised}{default}{where}."
    )
    return (chosen, MIXED) if scores.mixed else (chosen,)
