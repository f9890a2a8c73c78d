"""From a checkpoint, options and what was measured on text to a plan: which layers stay. Nothing is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from prunecli.architectures.records import Side
from prunecli.choices import Choices
from prunecli.errors import StatisticsError, UnsupportedModelError, UsageError
from prunecli.methods.layers.names import LayerMetric
from prunecli.methods.layers.select import best_runs, nearest_run, parse_layers
from prunecli.model.axes import Axis
from prunecli.model.decision import Decision, Origin, Ranked
from prunecli.model.depth import PRUNE_LAYERS
from prunecli.model.find_axes import axes_of
from prunecli.model.history import given, history_step
from prunecli.results.matching import scores_for
from prunecli.results.unit_scores import Scores, files_of, from_files
from prunecli.selection.given import read_kept
from prunecli.selection.select import Budget, places_of, select
from prunecli.selection.selection import Selection
from prunecli.text.plain import MIXED

if TYPE_CHECKING:
    from prunecli.model.checkpoint import Checkpoint

DEFAULT_RATIO = 0.25
"""About what ShortGPT removes (2403.03853)."""

MEASURED: tuple[LayerMetric, ...] = ("cosine", "cka", "perplexity", "embedding")
"""Those that look at text."""

LAST_WARNING = (
    "Warning: last looks at no text. On SmolLM2-135M it raised the perplexity of WikiText-2 from 18.5 to 4,530 at "
    "--ratio 0.1; cosine with --text raised it to 28.9."
)


Measure = Callable[[LayerMetric], Scores]
"""Runs the model on text."""


@dataclass(frozen=True)
class LayerOptions(Choices):
    """What `prune-layers` is asked.

    Attributes:
        ratio: fraction of the layers of `side` that go; with neither it nor another amount: DEFAULT_RATIO.
        count: layers of `side` that go.
        encoder, decoder: layers of each side that go, instead of these two.
        remove: those that go, by number: `3,7` or `encoder:3,decoder:7`.
        keep: those that stay, written the same way; a side that it does not name keeps all. Or a saved selection.
        side: the only side that may lose layers; None: all are ranked together.
        metric: by which layers are ranked; None: that of `scores`, else `cosine`; `plan_layers_on_text` takes
            `embedding` of an encoder without a head.
        scores: that were measured before, or one file of them or several, merged; None: text is read.
        contiguous: whether those that go from a stack lie side by side.
        dtype: type of the result; None: as stored.
        seed: of the metric `random`.
        text: what the metric was measured on, for the history.
    """

    ratio: float | None = None
    count: int | None = None
    encoder: int | None = None
    decoder: int | None = None
    remove: str | None = None
    keep: str | None = None
    side: Side | None = None
    metric: LayerMetric | None = None
    scores: Scores | Path | str | Sequence[Path | str] | None = None
    contiguous: bool = False
    dtype: str | None = None
    seed: int = 0
    text: Mapping[str, object] | None = None

    @property
    def is_named(self) -> bool:
        """Whether the layers are named, so that nothing is ranked."""
        return self.remove is not None or self.keep is not None

    @property
    def needs_text(self) -> bool:
        """Whether the model has to run on text."""
        return not self.is_named and self.scores is None and (self.metric or "cosine") in MEASURED


def plan_layers(checkpoint: Checkpoint, options: LayerOptions, measure: Measure | None = None) -> Selection:
    """Choose the layers to keep.

    Args:
        checkpoint: the source; its weights are not read.
        options: see there.
        measure: called where the metric needs text, and no scores are given.

    Raises:
        UnsupportedModelError: the family is not declared, or its layers cannot change their numbers.
        UsageError: options that contradict each other, or that leave a stack without layers.
        StatisticsError: files of scores that are damaged, of another model or metric.
    """
    refuse_contradictions(options)
    # By the numbers that the checkpoint counts.
    axes = {axis.side: replace(axis, ids=(*range(len(axis.ids)),)) for axis in axes_of(checkpoint, "layer")}
    kept = {axis.name: axis.ids for axis in axes.values()}
    groups = [([axis], Budget()) for axis in axes.values()]
    metric, scores, values = None, None, {}
    distances: dict[str, np.ndarray] = {}
    if options.is_named:
        kept |= _named(checkpoint, options, axes)
    else:
        groups = _groups(options, axes)
        scores = _scores(checkpoint, options, measure)
        metric = scores.method if scores else options.metric
        values = _values(checkpoint, axes, options, scores)
        for own, budget in groups:
            kept |= select(own, values, budget)  # refuses too many
            if options.contiguous and scores is not None:
                (axis,) = own
                distances[axis.name] = _distances(checkpoint, axis, scores)
                gone = nearest_run(distances[axis.name], budget.removed(own))
                kept[axis.name] = tuple(number for number in axis.ids if number not in gone)
    for axis in axes.values():
        if not kept[axis.name]:
            raise UsageError(f"No layer of the {axis.side} would stay.", "Keep one of each stack at least.")
    sizes = checkpoint.layout.sizes
    key = sizes.family.numbered
    if key is not None and sizes.value(key) and any(own != (*range(len(own)),) for own in kept.values()):
        raise UnsupportedModelError(
            f'{checkpoint.path}: config.json has "{key}": what a layer computes depends on its number.',
            "Only the last layers can go: --metric last.",
        )
    removed = {side: sorted(set(axis.ids).difference(kept[axis.name])) for side, axis in axes.items()}
    arguments = {
        "removed": {side: numbers for side, numbers in removed.items() if numbers} or None,
        "ratio": options.ratio,
        "count": options.count,
        "encoder": options.encoder,
        "decoder": options.decoder,
        "side": options.side,
        "metric": metric,
        "contiguous": options.contiguous or None,
        "text": None if options.text is None else dict(options.text),
        "seed": options.seed if metric == "random" else None,
        "dtype": options.dtype,
    }
    step = history_step(PRUNE_LAYERS, checkpoint, given(arguments), files_of(options.scores))
    if distances:
        values = {
            own[0].name: np.array(best_runs(distances[own[0].name], max(budget.removed(own), 1)))
            for own, budget in groups
        }
    places: list[Ranked] = []
    for own, _ in groups:
        cut = " and ".join(axis.side for axis in own)
        places += places_of(own, kept, values if scores else None, cut=cut)
    original = checkpoint.structure.original_layer
    return Selection(
        {
            axis.name: tuple(original(side, number) for number in kept[axis.name])
            for side, axis in axes.items()
        },
        options.dtype,
        step,
        () if metric is None else _reasons(metric, options, scores),
        _decision(options, places, scores, step),
    )


def _decision(
    options: LayerOptions, places: Sequence[Ranked], scores: Scores | None, step: Mapping[str, Any]
) -> Decision:
    if scores is None:
        named = f"named by {'--keep' if options.remove is None else '--remove'}"
        ways = {None: named, "random": f"drawn at random (seed {options.seed})"}
        how = ways.get(options.metric, "by its place: the last layers of a stack go")
        return Decision("layer", tuple(places), how=how)
    name, how = f"{scores.method} score", "the lowest go"
    if options.contiguous:
        name, how = "angle of its best run", "the run of layers side by side whose angle is least goes"
    is_given = options.scores is not None
    return Decision(
        "layer",
        tuple(replace(place, tokens=scores.tokens.get(place.name)) for place in places),
        name,
        how,
        "one layer of each stack stays",
        origin=scores.origin.read_from(step) if is_given else Origin.of_text(options.text),
    )


def refuse_contradictions(options: LayerOptions) -> None:
    """Refuse options that do not go together.

    Raises:
        UsageError: they do not.
    """
    by_side = (options.encoder, options.decoder)
    amounts = {
        "--remove": options.remove is not None,
        "--keep": options.keep is not None,
        "--ratio": options.ratio is not None,
        "--count": options.count is not None,
        "--encoder and --decoder": any(number is not None for number in by_side),
    }
    chosen = [name for name, is_given in amounts.items() if is_given]
    if len(chosen) > 1:
        raise UsageError(
            f"{chosen[0]} does not go with {chosen[1]}.", "Each says which layers or how many go."
        )
    ranked = options.metric is not None or options.scores is not None or options.contiguous
    if options.is_named and (ranked or options.side is not None):
        raise UsageError(
            f"{chosen[0]} names layers: nothing is ranked.",
            "Leave out --metric, --scores, --contiguous, --side.",
        )
    if options.scores is not None and options.metric not in (None, *MEASURED):
        raise UsageError(
            f"--scores: --metric {options.metric} looks at no text.",
            f"Leave --scores out, or choose {', '.join(MEASURED)}.",
        )
    if options.side is not None and any(number is not None for number in by_side):
        raise UsageError("--side does not go with --encoder and --decoder.", "Give one of them, or --count.")
    if options.contiguous and options.metric not in (None, "cosine"):
        raise UsageError(
            f"--contiguous: a run of layers has no {options.metric} of its own.",
            "Use it with --metric cosine.",
        )


def _named(
    checkpoint: Checkpoint, options: LayerOptions, axes: Mapping[str, Axis]
) -> dict[str, tuple[int, ...]]:
    """Name of each stack's axis -> numbers of its layers that stay, of the stacks that --remove or --keep names."""
    depths = {side: len(axis.ids) for side, axis in axes.items()}
    if options.remove is not None:
        gone = parse_layers("--remove", options.remove, depths)
        return {
            axes[side].name: tuple(number for number in axes[side].ids if number not in numbers)
            for side, numbers in gone.items()
        }
    keep = str(options.keep)
    if not keep[:1].isdigit() and Path(keep).is_file():
        stored = axes_of(checkpoint, "layer")
        saved = read_kept(Path(keep), stored)
        return {axis.name: tuple(map(axis.ids.index, saved[axis.name])) for axis in stored}
    return {axes[side].name: numbers for side, numbers in parse_layers("--keep", keep, depths).items()}


def _groups(options: LayerOptions, axes: Mapping[str, Axis]) -> list[tuple[list[Axis], Budget]]:
    """Stacks whose layers are ranked together, and how many of these go."""
    by_side = {"encoder": options.encoder, "decoder": options.decoder}
    counts = {side: count for side, count in by_side.items() if count is not None}
    for side in (*counts, *([options.side] if options.side else [])):
        if side not in axes:
            raise UsageError(f"The model has no {side}.", f"It has {', '.join(axes)} layers only.")
    if counts:
        return [([axes[side]], Budget(count=count, together=True, least=1)) for side, count in counts.items()]
    own = [axis for side, axis in axes.items() if options.side in (None, side)]
    if options.contiguous and len(own) > 1:
        raise UsageError(
            "--contiguous: how many layers of each stack?", "Give --encoder N and --decoder M, or --side."
        )
    ratio = DEFAULT_RATIO if options.ratio is None else options.ratio
    return [(own, Budget(ratio, options.count, together=True, least=1))]


def _scores(checkpoint: Checkpoint, options: LayerOptions, measure: Measure | None) -> Scores | None:
    """The given or measured scores; None: the metric looks at no text.

    Raises:
        StatisticsError: a file of another model or metric.
        UsageError: no text.
    """
    metric = options.metric or "cosine"
    if options.scores is None:
        if metric not in MEASURED:
            return None
        if measure is None:
            raise UsageError(f"--metric {metric} needs text.", "Give --data or --text, or --metric last.")
        return measure(metric)
    scores = scores_for(checkpoint, options.scores, "layer")
    asked = "cosine" if options.contiguous else options.metric
    if asked not in (None, scores.method):
        files = files_of(options.scores)
        raise StatisticsError(
            f"{files[0] if files else 'The scores'}: of the metric {scores.method}, not {asked}.",
            f"Give a file of prunecli prune-layers --metric {asked} --save-scores.",
        )
    return scores


def _values(
    checkpoint: Checkpoint, axes: Mapping[str, Axis], options: LayerOptions, scores: Scores | None
) -> dict[str, np.ndarray]:
    """Name of each stack's axis -> `[layers]`: what is lost without a layer."""
    if scores is not None:
        return scores.picked(axes_of(checkpoint, "layer"))
    if options.metric == "random":
        generator = np.random.default_rng(options.seed)
        return {axis.name: generator.random(len(axis.ids)) for axis in axes.values()}
    # The last go first, the same share of each stack.
    depths = {axis.name: len(axis.ids) for axis in axes.values()}
    return {name: np.arange(depth, 0, -1) / depth for name, depth in depths.items()}


def _distances(checkpoint: Checkpoint, axis: Axis, scores: Scores) -> np.ndarray:
    """`[layers + 1, layers + 1]`: angles between the states before the layers that the checkpoint holds."""
    if axis.name not in scores.distances:
        raise StatisticsError(
            "--contiguous: the scores hold no distances between layers.", "Measure them again, on text."
        )
    (stored,) = (own for own in axes_of(checkpoint, "layer") if own.name == axis.name)
    places = [*scores.places(stored), len(scores.ids[axis.name])]
    return (np.array(scores.distances[axis.name]) / scores.counts[axis.name])[np.ix_(places, places)]


def _reasons(metric: str, options: LayerOptions, scores: Scores | None) -> tuple[str, ...]:
    """Lines that say how the layers are chosen."""
    how = "one after another, " if options.contiguous else ""
    default = " (default)" if options.metric is None and options.scores is None else ""
    lines = [f"Layers by {metric}{default}{from_files(options.scores)}, {how}the lowest go."]
    if metric == "random":
        lines = [f"Layers drawn at random (seed {options.seed})."]
    if scores and scores.mixed:
        lines.append(MIXED)
    if {options.ratio, options.count, options.encoder, options.decoder} == {None}:
        lines.insert(0, f"No --ratio given: removing {DEFAULT_RATIO:.0%} of the layers.")
    return tuple(lines)
