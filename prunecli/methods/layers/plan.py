"""From a checkpoint, options and what was measured on text to a plan: which layers stay. Nothing is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np

from prunecli.architectures.records import Side
from prunecli.choices import Choices
from prunecli.errors import UnsupportedModelError, UsageError
from prunecli.methods.layers.names import LayerMetric
from prunecli.methods.layers.select import (
    Distances,
    Scores,
    best_runs,
    last_scores,
    nearest_run,
    parse_layers,
    random_scores,
    removed_count,
)
from prunecli.model.axes import Axis
from prunecli.model.decision import Decision, Origin, Ranked
from prunecli.model.depth import PRUNE_LAYERS
from prunecli.model.find_axes import axes_of
from prunecli.model.history import given, history_step
from prunecli.results.arrays import LARGEST
from prunecli.selection.saved import read_kept
from prunecli.selection.select import Budget, places_of, select
from prunecli.selection.selection import Selection

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


@dataclass(frozen=True)
class Measured:
    """What running the model on text says of its layers.

    Attributes:
        scores: of each layer, by the metric.
        distances: of the states before any two layers; None where the metric is none of states.
        tokens: side -> real tokens that went through its layers, where they were counted.
    """

    scores: Scores
    distances: Distances | None = None
    tokens: Mapping[str, int] = field(default_factory=dict)


Measure = Callable[[LayerMetric], Measured]
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
        metric: by which layers are ranked; None: `cosine`; `plan_layers_on_text` takes `embedding` of an encoder
            without a head.
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
        return not self.is_named and (self.metric or "cosine") in MEASURED


def plan_layers(checkpoint: Checkpoint, options: LayerOptions, measure: Measure | None = None) -> Selection:
    """Choose the layers to keep.

    Args:
        checkpoint: the source; its weights are not read.
        options: see there.
        measure: called where the metric needs text.

    Raises:
        UnsupportedModelError: the family is not declared, or its layers cannot change their numbers.
        UsageError: options that contradict each other, or that leave a stack without layers.
    """
    sizes = checkpoint.layout.sizes
    depths = {stack.side: sizes.depth(stack) for stack in sizes.family.stacks}
    axes = {
        cast("Side", axis.side): replace(axis, ids=tuple(range(len(axis.ids))))
        for axis in axes_of(checkpoint, "layer")
    }
    refuse_contradictions(options)
    counts: dict[tuple[Side, ...], int] = {(side,): 0 for side in depths}
    measured = Measured({})
    if options.is_named:
        gone = _named(checkpoint, options, depths)
        reasons: tuple[str, ...] = ()
    else:
        counts = _counts(options, depths)
        gone, measured, reasons = _ranked(options, axes, counts, measure)
    kept = {
        side: tuple(number for number in range(depth) if number not in gone.get(side, ()))
        for side, depth in depths.items()
    }
    for side, numbers in kept.items():
        if not numbers:
            raise UsageError(f"No layer of the {side} would stay.", "Keep one of each stack at least.")
    key = sizes.family.numbered
    if key is not None and sizes.value(key) and any(list(own) != [*range(len(own))] for own in kept.values()):
        raise UnsupportedModelError(
            f'{checkpoint.path}: config.json has "{key}": what a layer computes depends on its number.',
            "Only the last layers can go: --metric last.",
        )
    removed = {side: list(numbers) for side, numbers in gone.items() if numbers}
    arguments = {
        "removed": removed or None,
        "ratio": options.ratio,
        "count": options.count,
        "encoder": options.encoder,
        "decoder": options.decoder,
        "side": options.side,
        "metric": None if options.is_named else options.metric or "cosine",
        "contiguous": options.contiguous or None,
        "text": None if options.text is None else dict(options.text),
        "seed": options.seed if options.metric == "random" else None,
        "dtype": options.dtype,
    }
    step = history_step(PRUNE_LAYERS, checkpoint, given(arguments))
    decision = _decision(options, axes, kept, measured, counts)
    by_axis = {
        f"{side}.layers": tuple(checkpoint.structure.original_layer(side, number) for number in own)
        for side, own in kept.items()
    }
    return Selection(by_axis, options.dtype, step, reasons, decision)


def _decision(
    options: LayerOptions,
    axes: Mapping[Side, Axis],
    kept: Mapping[Side, Sequence[int]],
    measured: Measured,
    counts: Mapping[tuple[Side, ...], int],
) -> Decision:
    metric = None if options.is_named else options.metric or "cosine"

    def ranked(values: Scores | None) -> tuple[Ranked, ...]:
        """The layers of each stack, by what they were compared with those of other stacks; None: by nothing."""
        found: tuple[Ranked, ...] = ()
        for sides in counts:
            own = [axes[side] for side in sides]
            # A loss may be infinite.
            worth = {axes[side].name: np.minimum(values[side], LARGEST) for side in sides if values}
            by_axis = {axes[side].name: kept[side] for side in sides}
            found += places_of(own, by_axis, worth or None, cut=" and ".join(sides))
        return found

    if metric is None or metric not in MEASURED:
        named = "--remove" if options.remove is not None else "--keep"
        ways = {None: f"named by {named}", "random": f"drawn at random (seed {options.seed})"}
        how = ways.get(metric, "by its place: the last layers of a stack go")
        return Decision("layer", ranked(None), how=how)
    values, name, how = measured.scores, f"{metric} score", "the lowest go"
    if options.contiguous and measured.distances is not None:
        values = {
            side: best_runs(measured.distances[side], max(count, 1)) for (side,), count in counts.items()
        }
        name, how = "angle of its best run", "the run of layers side by side whose angle is least goes"
    return Decision(
        "layer",
        tuple(replace(place, tokens=measured.tokens.get(place.side)) for place in ranked(values)),
        name,
        how,
        "one layer of each stack stays",
        origin=Origin.of_text(options.text),
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
    if options.is_named and (options.metric is not None or options.contiguous or options.side is not None):
        raise UsageError(
            f"{chosen[0]} names layers: nothing is ranked.", "Leave out --metric, --contiguous, --side."
        )
    if options.side is not None and any(number is not None for number in by_side):
        raise UsageError("--side does not go with --encoder and --decoder.", "Give one of them, or --count.")
    if options.contiguous and options.metric not in (None, "cosine"):
        raise UsageError(
            f"--contiguous: a run of layers has no {options.metric} of its own.",
            "Use it with --metric cosine.",
        )


def _named(
    checkpoint: Checkpoint, options: LayerOptions, depths: Mapping[Side, int]
) -> dict[Side, tuple[int, ...]]:
    if options.remove is not None:
        return parse_layers("--remove", options.remove, depths)
    keep = str(options.keep)
    if not keep[:1].isdigit() and Path(keep).is_file():
        axes = axes_of(checkpoint, "layer")
        saved = read_kept(Path(keep), axes)
        kept = {cast("Side", axis.side): tuple(map(axis.ids.index, saved[axis.name])) for axis in axes}
    else:
        kept = parse_layers("--keep", keep, depths)
    return {
        side: tuple(number for number in range(depths[side]) if number not in numbers)
        for side, numbers in kept.items()
    }


def _ranked(
    options: LayerOptions,
    axes: Mapping[Side, Axis],
    counts: Mapping[tuple[Side, ...], int],
    measure: Measure | None,
) -> tuple[dict[Side, tuple[int, ...]], Measured, tuple[str, ...]]:
    """Layers that go, what was measured of all, and lines that say how."""
    metric = options.metric or "cosine"
    if options.contiguous and any(len(sides) > 1 for sides in counts):
        raise UsageError(
            "--contiguous: how many layers of each stack?", "Give --encoder N and --decoder M, or --side."
        )
    depths = {side: len(axis.ids) for side, axis in axes.items()}
    if metric == "random":
        measured = Measured(random_scores(depths, options.seed))
    elif metric == "last":
        measured = Measured(last_scores(depths))
    elif measure is None:
        raise UsageError(f"--metric {metric} needs text.", "Give --data or --text, or --metric last.")
    else:
        measured = measure(metric)
    scores = measured.scores
    gone: dict[Side, tuple[int, ...]] = {}
    for sides, count in counts.items():
        values = {axes[side].name: np.asarray(scores[side]) for side in sides}
        budget = Budget(count=count, together=True, least=1)
        chosen = select([axes[side] for side in sides], values, budget)  # refuses too many
        for side in sides:
            stay = chosen[axes[side].name]
            gone[side] = tuple(number for number in axes[side].ids if number not in stay)
            if options.contiguous:
                assert measured.distances is not None
                gone[side] = nearest_run(measured.distances[side], count)
    how = "one after another, " if options.contiguous else ""
    lines = [f"Layers by {metric}{' (default)' if options.metric is None else ''}, {how}the lowest go."]
    if metric == "random":
        lines = [f"Layers drawn at random (seed {options.seed})."]
    if (
        options.ratio is None
        and options.count is None
        and options.encoder is None
        and options.decoder is None
    ):
        lines.insert(0, f"No --ratio given: removing {DEFAULT_RATIO:.0%} of the layers.")
    return gone, measured, tuple(lines)


def _counts(options: LayerOptions, depths: Mapping[Side, int]) -> dict[tuple[Side, ...], int]:
    """Sides whose layers are ranked together -> how many of these go."""
    by_side: dict[Side, int | None] = {"encoder": options.encoder, "decoder": options.decoder}
    for side in (*(name for name, number in by_side.items() if number is not None), options.side):
        if side is not None and side not in depths:
            raise UsageError(f"The model has no {side}.", f"It has {', '.join(depths)} layers only.")
    if any(number is not None for number in by_side.values()):
        return {(side,): number for side, number in by_side.items() if number is not None}
    sides = tuple(depths) if options.side is None else (options.side,)
    if options.count is not None:
        return {sides: options.count}
    ratio = DEFAULT_RATIO if options.ratio is None else options.ratio
    return {sides: removed_count(ratio, sum(depths[side] for side in sides))}
