"""Heads, hidden units and layers: the scores and the selection that their three methods share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prunecli.errors import UsageError
from prunecli.evaluation.on_text import RunOptions, describe, measured_text
from prunecli.methods.options import UnitOptions
from prunecli.model.axes import Axis
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.decision import Decision, Origin, Ranked
from prunecli.model.history import given, history_step
from prunecli.progress import Progress, Say, silent, unsaid
from prunecli.results.matching import scores_for
from prunecli.results.unit_scores import Scores, files_of
from prunecli.selection.select import Kept
from prunecli.selection.selection import Selection
from prunecli.text.choice import Dataset, TextChoice
from prunecli.text.plain import MIXED, PlainText
from prunecli.text.tasks import TaskName


@dataclass(frozen=True)
class TextRun:
    """Text that units are measured on, and how the model runs on it.

    Attributes:
        choice: the text: parallel for a model with encoder and decoder, plain for others.
        running: batch size and device.
        save: called with the measured scores.
        progress: shows how far the run is.
        say: called with plain lines about choices made by default.
    """

    choice: TextChoice
    running: RunOptions = field(default_factory=RunOptions)
    save: Callable[[Scores], object] | None = None
    progress: Progress = silent
    say: Say = unsaid


def measured(
    checkpoint: Checkpoint,
    options: UnitOptions,
    metric: str,
    run: TextRun | None,
    measure: Callable[[Dataset, TextRun], Scores],
    *,
    axes: Sequence[Axis] | None = None,
    task: TaskName | None = None,
    without: str,
) -> tuple[Scores, dict[str, Any] | None]:
    """Scores of the units: those of `options`, else measured on text; and what the history says of this text.

    Args:
        metric: what is measured, for messages.
        run: the text. If None, `options` must have scores.
        measure: runs the model on text.
        axes: axes that must have scores. If None, all of the kind.
        task: the task that plain text is read for, see `measured_text`.
        without: a metric that needs no text, for messages.

    Raises:
        UsageError: no text.
        StatisticsError: files that are damaged or of another model.
        PruneError: text or a model that cannot be used.
    """
    if options.scores is not None:
        return scores_for(checkpoint, options.scores, options.KIND, axes), None
    if run is None:
        raise UsageError(f"`metric={metric}` needs text.", f"Give `data` or `files`, or `metric={without}`.")
    other = f"`metric={without}` (it can ruin a model)"
    data = measured_text(checkpoint, run.choice, f"`metric={metric}`", run.say, task=task, without=other)
    origin = {
        "task": data.task,
        "texts": list(run.choice.texts),
        "split": run.choice.split_read,
        "whole_files": data.text.whole_files if isinstance(data.text, PlainText) else None,
    }
    scores = measure(data, run).model_copy(update=origin)
    if run.save is not None:
        run.save(scores)
    return scores, describe(data, run.choice)


def selection(
    checkpoint: Checkpoint,
    options: UnitOptions,
    kept: Kept,
    places: Sequence[Ranked],
    arguments: Mapping[str, Any],
    reasons: Sequence[str],
    scores: Scores | None,
    *,
    metric: str | None,
    how: str,
    least: str = "",
) -> Selection:
    """The units to keep, with their history entry and their decision.

    Args:
        kept: name of an axis -> ids that stay.
        places: the units that were compared.
        arguments: what the history records; seed and type are added.
        reasons: lines that say how the units were chosen.
        scores: the scores that decided. If None, no scores did.
        metric, how, least: see `Decision`; not used for the metric `random`.
    """
    is_random = options.metric == "random"
    step = history_step(
        options.COMMAND,
        checkpoint,
        given({**options.recorded(), **arguments, "seed": options.seed if is_random else None}),
        files_of(options.scores) if scores else (),
    )
    origin = Origin.of_text(arguments.get("text"))
    decision = Decision(
        options.KIND,
        tuple(places),
        None if is_random else metric,
        f"drawn at random (seed {options.seed})" if is_random else how,
        least,
        origin=scores.origin.read_from(step) if scores and options.scores is not None else origin,
    )
    lines = [*reasons, MIXED] if scores and scores.mixed else [*reasons]
    if not (options.is_named or options.has_amount):
        lines.insert(0, f"No `ratio` given: removing {options.DEFAULT_RATIO:.0%} of the {options.UNITS}.")
    return Selection(kept, options.dtype, step, tuple(lines), decision)
