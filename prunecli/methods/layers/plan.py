"""From a checkpoint, options and what was measured on text to a plan: which layers stay. Nothing is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

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
)
from prunecli.model.axes import Axis
from prunecli.model.decision import Decision, Origin, Ranked
from prunecli.model.depth import PRUNE_LAYERS
from prunecli.model.find_axes import axes_of
from prunecli.model.history import given, history_step
from prunecli.results.arrays import LARGEST
from prunecli.selection.saved import read_kept
from prunecli.selection.select import Budget, Kept, places_of, select
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
    refuse_contradictions(options)
    # By the numbers that the checkpoint counts.
    axes = {axis.side: replace(axis, ids=(*range(len(axis.ids)),)) for axis in axes_of(checkpoint, "layer")}
    kept = {axis.name: axis.ids for axis in axes.values()}
    metric = None if options.is_named else options.metric or "cosine"
    groups = [([axis], Budget()) for axis in axes.values()]
    measured = Measured({})
    if metric is None:
        kept |= _named(checkpoint, options, axes)
    else:
        groups = _groups(options, axes)
        measured = _measured(metric, options, axes, measure)
        for own, budget in groups:
            values = {axis.name: np.asarray(measured.scores[axis.side]) for axis in own}
            kept |= select(own, values, budget)  # refuses too many
            if options.contiguous and measured.distances is not None:
                (axis,) = own
                gone = nearest_run(measured.distances[axis.side], budget.removed(own))
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
        "seed": options.seed if options.metric == "random" else None,
        "dtype": options.dtype,
    }
    original = checkpoint.structure.original_layer
    return Selection(
        {
            axis.name: tuple(original(side, number) for number in kept[axis.name])
            for side, axis in axes.items()
        },
        options.dtype,
        history_step(PRUNE_LAYERS, checkpoint, given(arguments)),
        () if metric is None else _reasons(metric, options),
        _decision(metric, options, groups, kept, measured),
    )


def _decision(
    metric: LayerMetric | None,
    options: LayerOptions,
    groups: Sequence[tuple[Sequence[Axis], Budget]],
    kept: Kept,
    measured: Measured,
) -> Decision:
    values: Scores = measured.scores if metric in MEASURED else {}
    name, how = f"{metric} score", "the lowest go"
    if options.contiguous and measured.distances is not None:
        values = {
            own[0].side: best_runs(measured.distances[own[0].side], max(budget.removed(own), 1))
            for own, budget in groups
        }
        name, how = "angle of its best run", "the run of layers side by side whose angle is least goes"
    if not values:
        named = "--remove" if options.remove is not None else "--keep"
        ways = {None: f"named by {named}", "random": f"drawn at random (seed {options.seed})"}
        how = ways.get(metric, "by its place: the last layers of a stack go")
    places: list[Ranked] = []
    for own, _ in groups:
        # A loss may be infinite.
        worth = {axis.name: np.minimum(values[axis.side], LARGEST) for axis in own if values}
        places += places_of(own, kept, worth or None, cut=" and ".join(axis.side for axis in own))
    return Decision(
        "layer",
        tuple(replace(place, tokens=measured.tokens.get(place.side)) for place in places),
        name if values else None,
        how,
        "one layer of each stack stays" if values else "",
        origin=Origin.of_text(options.text) if values else Origin(),
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


def _measured(
    metric: LayerMetric, options: LayerOptions, axes: Mapping[str, Axis], measure: Measure | None
) -> Measured:
    depths = {side: len(axis.ids) for side, axis in axes.items()}
    if metric == "random":
        return Measured(random_scores(depths, options.seed))
    if metric == "last":
        return Measured(last_scores(depths))
    if measure is None:
        raise UsageError(f"--metric {metric} needs text.", "Give --data or --text, or --metric last.")
    return measure(metric)


def _reasons(metric: LayerMetric, options: LayerOptions) -> tuple[str, ...]:
    """Lines that say how the layers are chosen."""
    how = "one after another, " if options.contiguous else ""
    line = f"Layers by {metric}{' (default)' if options.metric is None else ''}, {how}the lowest go."
    if metric == "random":
        line = f"Layers drawn at random (seed {options.seed})."
    amounts = (options.ratio, options.count, options.encoder, options.decoder)
    if any(amount is not None for amount in amounts):
        return (line,)
    return (f"No --ratio given: removing {DEFAULT_RATIO:.0%} of the layers.", line)
