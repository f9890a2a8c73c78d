"""Choose the layers to keep: by scores, at random, by their places, or by their numbers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from prunecli.errors import StatisticsError, UnsupportedModelError, UsageError
from prunecli.methods.options import LayerOptions
from prunecli.methods.units import TextRun, measured, selection
from prunecli.model.axes import Axis
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.decision import Ranked
from prunecli.model.find_axes import axes_of
from prunecli.results.unit_scores import Array, Scores, files_of, from_files
from prunecli.selection.given import read_kept
from prunecli.selection.select import Budget, places_of, select
from prunecli.selection.selection import Selection
from prunecli.text.tasks import TaskName, training_task_of

LAST_WARNING = (
    "Warning: last looks at no text. On SmolLM2-135M it raised the perplexity of WikiText-2 from 18.5 to 4,530 at "
    "--ratio 0.1; cosine with --text raised it to 28.9."
)


def plan_layers(checkpoint: Checkpoint, options: LayerOptions, run: TextRun | None = None) -> Selection:
    """Choose the layers to keep.

    Args:
        checkpoint: the source; its weights are not read.
        run: text to run the model on, if the metric needs text and no scores are given.

    Raises:
        UnsupportedModelError: the family is not declared, or its layers cannot change their numbers.
        UsageError: options that contradict each other, or that leave a stack without layers.
        StatisticsError: files of scores that are damaged, of another model or metric.
        PruneError: text or a model that cannot be used.
    """
    options.check_options()
    stored = axes_of(checkpoint, "layer")
    # By the numbers that the checkpoint counts.
    axes = {axis.side: replace(axis, ids=(*range(len(axis.ids)),)) for axis in stored}
    kept = {axis.name: axis.ids for axis in axes.values()}
    groups = [([axis], Budget()) for axis in axes.values()]
    scores, text, values = None, None, {}
    metric: str | None = None
    reasons: list[str] = []
    how = f"named by --{'keep' if options.remove is None else 'remove'}"
    if options.is_named:
        kept |= _named(options, axes, stored)
    else:
        groups = _groups(options, axes)
        is_default = options.needs_text and not (options.metric or options.contiguous)
        if is_default and training_task_of(checkpoint) == "feature-extraction":
            # Without half of its layers by cosine, MiniLM's Spearman on STS-B falls to 0.844; at random to 0.894.
            options = options.model_copy(update={"metric": "embedding"})
        metric = options.metric or "cosine"
        if metric == "random":
            generator = np.random.default_rng(options.seed)
            values = {axis.name: generator.random(len(axis.ids)) for axis in axes.values()}
        elif metric == "last":
            # The last go first, the same share of each stack.
            depths = {axis.name: len(axis.ids) for axis in axes.values()}
            values = {name: np.arange(depth, 0, -1) / depth for name, depth in depths.items()}
            how = "by its place: the last layers of a stack go"
        else:
            scores, text = _measured(checkpoint, options, run)
            values, metric = scores.picked(stored), scores.method
        reasons = [_reason(metric, options)]
        for own, budget in groups:
            if scores and options.contiguous:
                (axis,) = own
                distances = _distances(stored, axis, scores)
                values[axis.name] = best_runs(distances, max(budget.removable(own), 1))
            kept |= select(own, values, budget)
    sizes = checkpoint.layout.sizes
    key = sizes.family.numbered
    if key is not None and sizes.value(key) and any(own != (*range(len(own)),) for own in kept.values()):
        raise UnsupportedModelError(
            f'{checkpoint.path}: config.json has "{key}": what a layer computes depends on its number.',
            "Only the last layers can be removed: `metric=last`.",
        )
    removed = {side: sorted(set(axis.ids).difference(kept[axis.name])) for side, axis in axes.items()}
    arguments = {
        "removed": {side: numbers for side, numbers in removed.items() if numbers} or None,
        "metric": metric,
        "text": text,
    }
    places: list[Ranked] = []
    for own, _ in groups:
        cut = " and ".join(axis.side for axis in own)
        tokens = scores.tokens if scores else None
        places += places_of(own, kept, values if scores else None, cut=cut, tokens=tokens)
    name = None
    if scores:
        name, how = f"{metric} score", "the lowest go"
        if options.contiguous:
            name, how = (
                "angle of its best run",
                "the run of layers side by side whose angle is least goes",
            )
    original = checkpoint.structure.original_layer
    return selection(
        checkpoint,
        options,
        {
            axis.name: tuple(original(side, number) for number in kept[axis.name])
            for side, axis in axes.items()
        },
        places,
        arguments,
        reasons,
        scores,
        metric=name,
        how=how,
        least="one layer of each stack stays" if scores else "",
    )


def _named(
    options: LayerOptions, axes: Mapping[str, Axis], stored: Sequence[Axis]
) -> dict[str, tuple[int, ...]]:
    """Name of each stack's axis -> numbers of its layers that stay, of the stacks that --remove or --keep names."""
    depths = {side: len(axis.ids) for side, axis in axes.items()}
    keeps = options.remove is None
    text = str(options.keep if keeps else options.remove)
    if keeps and not text[:1].isdigit() and Path(text).is_file():
        saved = read_kept(Path(text), stored)
        return {axis.name: tuple(map(axis.ids.index, saved[axis.name])) for axis in stored}
    named = parse_layers("keep" if keeps else "remove", text, depths)
    return {
        axes[side].name: tuple(number for number in axes[side].ids if (number in numbers) == keeps)
        for side, numbers in named.items()
    }


def _groups(options: LayerOptions, axes: Mapping[str, Axis]) -> list[tuple[list[Axis], Budget]]:
    """Stacks whose layers are ranked together, and how many of these go."""
    for side in (*options.by_side, *filter(None, [options.side])):
        if side not in axes:
            raise UsageError(f"The model has no {side}.", f"It has {', '.join(axes)} layers only.")
    if options.by_side:
        return [
            ([axes[side]], Budget(count=count, together=True, least=1))
            for side, count in options.by_side.items()
        ]
    own = [axis for side, axis in axes.items() if options.side in (None, side)]
    if options.contiguous and len(own) > 1:
        raise UsageError(
            "`contiguous`: the number of layers of each stack is not given.",
            "Give `encoder` and `decoder`, or `side`.",
        )
    return [(own, Budget(options.share, options.count, together=True, least=1))]


def _measured(
    checkpoint: Checkpoint, options: LayerOptions, run: TextRun | None
) -> tuple[Scores, dict[str, Any] | None]:
    """The given or measured scores, and what the history says of the text.

    Raises:
        StatisticsError: a file of another model or metric.
        UsageError: no text.
    """

    from prunecli.methods.layers.score import measure_layers

    metric = options.metric or "cosine"
    measure = partial(measure_layers, checkpoint, metric=metric)
    task: TaskName | None = "embedding" if metric == "embedding" else None
    scores, text = measured(checkpoint, options, metric, run, measure, task=task, without="last")
    method = scores.method
    asked = "cosine" if options.contiguous else options.metric
    if asked not in (None, method):
        files = files_of(options.scores)
        raise StatisticsError(
            f"{files[0] if files else 'The scores'}: of the metric {method}, not {asked}.",
            f"Give a file of prunecli prune-layers --metric {asked} --save-scores.",
        )
    return scores, text


def _distances(stored: Sequence[Axis], axis: Axis, scores: Scores) -> Array:
    """`[layers + 1, layers + 1]`: angles between the states before the layers that the checkpoint holds."""
    if axis.name not in scores.distances:
        raise StatisticsError(
            "`contiguous`: the scores hold no distances between layers.", "Measure them again, on text."
        )
    places = [place for own in stored if own.name == axis.name for place in scores.places(own)] + [
        len(scores.ids[axis.name])
    ]
    return (np.array(scores.distances[axis.name]) / scores.counts[axis.name])[np.ix_(places, places)]


def _reason(metric: str, options: LayerOptions) -> str:
    """Line that says how the layers are chosen."""
    if metric == "random":
        return f"Layers drawn at random (seed {options.seed})."
    how = "one after another, " if options.contiguous else ""
    default = " (default)" if options.metric is None and options.scores is None else ""
    return f"Layers by {metric}{default}{from_files(options.scores)}, {how}the lowest go."


def best_runs(distances: Array, count: int) -> Array:
    """`[layers]`: for each layer, the least distance between the ends of a run of `count` layers that it lies in.

    The `count` layers with the least values are a run: the one with the nearest ends (2403.17887, 3.2).

    Args:
        distances: `[layers + 1, layers + 1]`, of the states before the layers and after the last.
        count: at most the number of layers.
    """
    runs = np.diagonal(distances, count)
    return np.array(
        [runs[max(0, number - count + 1) : number + 1].min() for number in range(len(distances) - 1)]
    )


def parse_layers(option: str, text: str, depths: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """`3,7-9`, or `encoder:3,7,decoder:1`: numbers of layers by side, ascending.

    Args:
        option: what the text was given to, for messages.
        text: the numbers; a side holds until the next one is named, and a model with one stack needs none.
        depths: layers of each side of the model.

    Raises:
        UsageError: it is not of this form, or names what the model has not.
    """
    found: dict[str, set[int]] = {}
    side: str | None = next(iter(depths)) if len(depths) == 1 else None
    for part in text.split(","):
        match = re.fullmatch(r"\s*(?:(encoder|decoder)\s*:\s*)?(\d+)(?:\s*-\s*(\d+))?\s*", part)
        if match is None:
            raise UsageError(
                f"`{option}={part.strip()}`: no number of a layer.", "Write 3,7-9 or encoder:3,decoder:1."
            )
        side = match[1] or side
        if side is None:
            raise UsageError(
                f"`{option}={text}`: of which stack?",
                f"Write encoder:{part.strip()} or decoder:{part.strip()}.",
            )
        if side not in depths:
            raise UsageError(
                f"`{option}`: the model has no {side}.", f"It has {', '.join(depths)} layers only."
            )
        first, last = int(match[2]), int(match[3] or match[2])
        if not first <= last < depths[side]:
            raise UsageError(
                f"`{option}={part.strip()}`: the {side} has the layers 0 to {depths[side] - 1}.",
                "Count from 0.",
            )
        found.setdefault(side, set()).update(range(first, last + 1))
    return {name: tuple(sorted(numbers)) for name, numbers in found.items()}
