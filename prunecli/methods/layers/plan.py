"""Choose the layers to keep: by scores, at random, by their places, or by their numbers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from prunecli.errors import StatisticsError, UnsupportedModelError, UsageError
from prunecli.methods.options import LayerOptions
from prunecli.methods.units import Ranking, TextRun, by_scores, drawn, measured, plan
from prunecli.model.axes import Axis
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.find_axes import axes_of
from prunecli.results.unit_scores import Array
from prunecli.selection.select import Budget
from prunecli.selection.selection import Selection, decision_of, read_kept, selection_of
from prunecli.text.choice import TaskName, training_task_of

LAST_WARNING = (
    "Warning: last looks at no text. On SmolLM2-135M it raised the perplexity of WikiText-2 from 15.4 to 4,167 at "
    "`ratio=0.1`; cosine with `files` raised it to 22.6."
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
    axes = axes_of(checkpoint, "layer")
    made = _named(checkpoint, options, axes) if options.is_named else _ranked(checkpoint, options, axes, run)
    removed = {
        axis.side: [place for place, number in enumerate(axis.ids) if number not in made.kept[axis.name]]
        for axis in axes
    }
    sizes = checkpoint.layout.sizes
    key = sizes.family.numbered
    for axis in axes if key is not None and sizes.value(key) else ():
        depth, gone = axis.count, removed[axis.side]
        if gone != [*range(depth - len(gone), depth)]:
            raise UnsupportedModelError(
                f'{checkpoint.path}: config.json has "{key}": what a layer computes depends on its number.',
                "Only the last layers can be removed: `metric=last`.",
            )
    numbers = {side: gone for side, gone in removed.items() if gone}
    arguments = {**({"removed": numbers} if numbers else {}), **made.step["arguments"]}
    return replace(made, step={**made.step, "arguments": arguments})


def _ranked(
    checkpoint: Checkpoint, options: LayerOptions, axes: Sequence[Axis], run: TextRun | None
) -> Selection:
    """The layers with the highest values stay.

    Raises:
        StatisticsError: a file of another model or metric.
        UsageError: no text.
    """
    sides, counts = {axis.side: axis for axis in axes}, options.by_side
    for side in (*counts, *filter(None, [options.side])):
        if side not in sides:
            raise UsageError(f"The model has no {side}.", f"It has {', '.join(sides)} layers only.")
    chosen = [axis for axis in axes if axis.side in (counts or (options.side or axis.side,))]
    if options.contiguous and len(chosen) > 1 and not counts:
        raise UsageError(
            "`contiguous`: the number of layers of each stack is not given.",
            "Give `encoder` and `decoder`, or `side`.",
        )
    budget = Budget(options.share, options.count, scope="model", least=1)
    if counts:
        for axis in chosen:
            replace(budget, ratio=None, count=counts[axis.side]).removable([axis])
        budget = Budget(keep={axis.name: axis.count - counts[axis.side] for axis in chosen})
    metric = options.metric or "cosine"
    is_default = options.needs_text and not (options.metric or options.contiguous)
    if is_default and training_task_of(checkpoint) == "feature-extraction":
        # Without half of its layers by cosine, MiniLM's Spearman on STS-B falls to 0.844; at random to 0.894.
        metric = "embedding"
    text = None
    if metric == "random":
        ranking = drawn(axes, options.seed)
    elif metric == "last":
        # The last go first, the same share of each stack.
        depths = {axis.name: axis.count for axis in axes}
        values = {name: np.arange(depth, 0, -1) / depth for name, depth in depths.items()}
        ranking = Ranking(values, metric, how="by their place, the last first")
    else:
        from prunecli.methods.layers.score import measure_layers

        measure = partial(measure_layers, checkpoint, metric=metric)
        task: TaskName | None = "embedding" if metric == "embedding" else None
        scores, text = measured(checkpoint, options, metric, run, measure, task=task, without="last")
        asked = "cosine" if options.contiguous else options.metric
        if asked not in (None, scores.method):
            files = options.score_files
            raise StatisticsError(
                f"{files[0] if files else 'The scores'}: of the metric {scores.method}, not {asked}.",
                f"Give a file of prunecli prune-layers --metric {asked} --save-scores.",
            )
        values = scores.picked(axes)
        for axis in chosen if options.contiguous else ():
            count = counts.get(axis.side) or budget.removable(chosen)
            if axis.name not in scores.distances:
                raise StatisticsError(
                    "`contiguous`: the scores hold no distances between layers.",
                    "Measure them again, on text.",
                )
            places = [*scores.places(axis), len(scores.ids[axis.name])]
            distances = np.array(scores.distances[axis.name]) / scores.counts[axis.name]
            values[axis.name] = best_runs(distances[np.ix_(places, places)], max(count, 1))
        shown = "angle of its best run" if options.contiguous else f"{scores.method} score"
        ranking = by_scores(scores, values, options, scores.method, shown, text)
    arguments = {
        "ratio": options.ratio,
        "metric": ranking.metric or metric,
        "text": text,
    }
    return plan(checkpoint, options, axes, budget, ranking, arguments, chosen=chosen)


def _named(checkpoint: Checkpoint, options: LayerOptions, axes: Sequence[Axis]) -> Selection:
    """The layers that `remove` or `keep` names."""
    keeps = options.remove is None
    flag, text = ("keep", str(options.keep)) if keeps else ("remove", str(options.remove))
    if keeps and not text[:1].isdigit() and Path(text).is_file():
        kept = read_kept(Path(text), axes)
    else:
        named = parse_layers(flag, text, {axis.side: axis.count for axis in axes})
        kept = {
            axis.name: tuple(
                number
                for place, number in enumerate(axis.ids)
                if axis.side not in named or (place in named[axis.side]) == keeps
            )
            for axis in axes
        }
    decision = decision_of(axes, kept, how=f"named by --{flag}")
    return selection_of(options.COMMAND, checkpoint, axes, decision, options.recorded(), dtype=options.dtype)


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
    side = next(iter(depths)) if len(depths) == 1 else None
    for part in text.split(","):
        match = re.fullmatch(r"\s*(?:(encoder|decoder)\s*:\s*)?(\d+)(?:\s*-\s*(\d+))?\s*", part)
        side = (match and match[1]) or side
        first, last = (int(match[2]), int(match[3] or match[2])) if match else (1, 0)
        if side is None or not first <= last < depths.get(side, 0):
            ranges = " and ".join(f"{name}:0-{depth - 1}" for name, depth in depths.items())
            raise UsageError(
                f"`{option}={part.strip()}`: no layer of this model.",
                f"It has the layers {ranges}; write 3,7-9 or encoder:3,decoder:1.",
            )
        found.setdefault(side, set()).update(range(first, last + 1))
    return {name: tuple(sorted(numbers)) for name, numbers in found.items()}
