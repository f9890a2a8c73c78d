"""The scores of units, and the one plan of all methods: from values and a budget to a selection."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from prunecli.architectures.records import Carrier
from prunecli.errors import StatisticsError, UsageError
from prunecli.evaluation.on_text import RunOptions, describe, measured_text, text_fields
from prunecli.methods.options import ExpertOptions, UnitOptions
from prunecli.model.axes import Axis
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.decision import Origin
from prunecli.progress import Progress, Say, silent, unsaid
from prunecli.results.matching import scores_for
from prunecli.results.unit_scores import Array, Scores
from prunecli.selection.cut import Selection, decision_of, num_removed, read_kept, selection_of
from prunecli.selection.select import HOLDERS, Budget, Values, best, held_in, select
from prunecli.tensors.stream import Copy, Expression, values
from prunecli.text.choice import Dataset, TaskName, TextChoice
from prunecli.text.plain import MIXED


@dataclass(frozen=True)
class TextRun:
    """Text that units are measured on, and how the model runs on it.

    Attributes:
        choice: the text: parallel for a model with encoder and decoder, plain for others.
        running: batch size, device and memory.
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
    axes: Sequence[Axis],
    task: TaskName | None = None,
    without: str,
) -> tuple[Scores, dict[str, Any] | None]:
    """Scores of the units: those of `options`, else measured on text; and what the history says of this text.

    Args:
        metric: name of the metric, for messages.
        run: the text. If None, `options` must have scores.
        measure: runs the model on text.
        axes: axes that must have scores.
        task: the task that plain text is read for, see `measured_text`.
        without: a metric that needs no text, for messages.

    Raises:
        UsageError: no text.
        StatisticsError: files that are damaged, or of another model or metric.
        PruneError: text or a model that cannot be used.
    """
    if options.scores is not None:
        scores, asked = scores_for(checkpoint, options.scores, axes), options.metric or ""
        # The sums of activations serve both metrics of activations.
        if asked.split("-")[0] not in ("", scores.method.split("-")[0]):
            files = options.score_files
            raise StatisticsError(
                f"{files[0] if files else 'The scores'}: of the metric {scores.method}, not {asked}.",
                "Leave `metric` out, or measure the scores again with it: `save_scores`.",
            )
        return scores, None
    if run is None:
        raise UsageError(f"`metric={metric}` needs text.", f"Give `data` or `files`, or `metric={without}`.")
    other = f"`metric={without}` (it can ruin a model)"
    data = measured_text(checkpoint, run.choice, f"`metric={metric}`", run.say, task=task, without=other)
    scores = measure(data, run).model_copy(update=text_fields(data, run.choice))
    if run.save is not None:
        run.save(scores)
    return scores, describe(data, run.choice)


def unit_norms(
    checkpoint: Checkpoint,
    carriers: Mapping[str, Carrier],
    count: int,
    made: Callable[[str], Expression] = Copy,
) -> Array:
    """The product over matrices of the l2 norm of a unit's part, `[units]` float64; they are read block by block.

    Args:
        carriers: matrix -> where the units lie.
        count: number of units.
        made: what a matrix is made of, by its name.

    Raises:
        CheckpointError: a file ends early.
    """
    product = np.ones(count)
    for name, carrier in carriers.items():
        found = []
        for rows in values(checkpoint, made(name)):
            others = tuple(other for other in range(rows.ndim) if other != carrier.dim)
            found.append(np.square(rows).sum(axis=others))
        each = np.concatenate(found) if carrier.dim == 0 else np.sum(found, axis=0)
        for block in each.reshape(len(carrier.blocks), count, -1):
            product *= np.sqrt(block.sum(axis=1))
    return product


@dataclass(frozen=True)
class Ranking:
    """Values of units, and where they come from.

    Attributes:
        values: name of an axis -> `[units]`: the more a unit matters, the higher.
        metric: name of the values.
        shown: name of the values in the decision, if another one.
        how: words for the choice, if the values are no property of the units (random numbers).
        is_default: whether the metric is the default one.
        note: words about the values, for the reasons.
        files: files that the values come from.
        origin: the text that they were measured on.
        tokens: name of an axis -> number of tokens that they were measured on.
        mixed: see `results.document.Statistics`.
        alone: language or text -> name of an axis -> the values for it alone, where it counts.
        metrics: name of an axis -> its metric, if another one.
    """

    values: dict[str, Any]
    metric: str = ""
    shown: str = ""
    how: str = ""
    is_default: bool = False
    note: str = ""
    files: Sequence[Path] = ()
    origin: Origin = field(default_factory=Origin)
    tokens: Mapping[str, int] = field(default_factory=dict)
    mixed: bool = False
    alone: Mapping[str, Values] = field(default_factory=dict)
    metrics: Mapping[str, str] = field(default_factory=dict)


def by_scores(
    scores: Scores,
    values: dict[str, Any],
    options: UnitOptions,
    metric: str,
    shown: str = "",
    text: Any = None,
) -> Ranking:
    """The values that scores give; `text`: what the history says of the text, if they were measured just now."""
    return Ranking(
        values,
        metric,
        shown,
        is_default=text is not None and options.metric is None,
        files=options.score_files,
        origin=scores.origin if text is None else Origin.of_text(text),
        tokens=scores.tokens,
        mixed=scores.mixed,
    )


def drawn(axes: Sequence[Axis], seed: int, note: str = "") -> Ranking:
    """Random values in (0, 1] for the units of the axes.

    Values are drawn for the units of the original model, so that pruning in steps removes the same units as pruning at
    once.

    Args:
        note: further words about the choice.
    """
    generator = np.random.default_rng(seed)
    values = {axis.name: 1.0 - generator.random(axis.original)[[*axis.ids]] for axis in axes}
    return Ranking(values, how=f"drawn at random (seed {seed}){note}")


def kept_by_file(checkpoint: Checkpoint, options: UnitOptions, axes: Sequence[Axis]) -> Selection:
    """The units that the file `keep` names.

    Raises:
        StatisticsError: as `read_kept`.
    """
    path = Path(str(options.keep))
    kept = read_kept(path, axes)
    return selection_of(
        options,
        checkpoint,
        axes,
        decision_of(axes, kept, how=f"named in {path.name}"),
        {"removed": num_removed(axes, kept)},
        (path,),
        reasons=(f"{options.UNITS.capitalize()} by {path}.",),
    )


def plan(
    checkpoint: Checkpoint,
    options: UnitOptions | ExpertOptions,
    axes: Sequence[Axis],
    budget: Budget,
    ranking: Ranking,
    arguments: Mapping[str, Any],
    *,
    chosen: Sequence[Axis] = (),
    of: str = "",
    by_share: bool = False,
    reasons: Sequence[str] = (),
    notes: Mapping[str, Any] = {},
) -> Selection:
    """Select the units to keep, with the reasons, the decision and the history entry.

    Args:
        axes: all axes of the selection.
        budget: budget for the axes `chosen`.
        ranking: values of the units.
        arguments: arguments for the history; the recorded options and the seed are added, and the number of units that
            go as `removed` if it has this key.
        chosen: the axes that may lose units. If empty, all.
        of: place of the units in words, for the reasons.
        by_share: compare the values of different axes as shares of their axis' l2 norm.
        reasons: further lines.
        notes: further fields of the history entry.

    Raises:
        UsageError: a budget that these axes cannot meet.
        StatisticsError: with a balance, an axis whose values do not add up to a positive number.
    """
    chosen, values = chosen or axes, ranking.values
    shares = {name: own / (np.linalg.norm(own) or 1) for name, own in values.items()} if by_share else values
    kept, thetas = select(chosen, shares, budget)
    alone = {
        text: {
            axis.name: best(axis, own[axis.name], len(kept[axis.name]), budget.groups)
            for axis in chosen
            # Without a token, a language or text has no units of its own.
            if axis.name in own and 0 < own[axis.name].sum() < np.inf
        }
        for text, own in ranking.alone.items()
    }
    decision = decision_of(
        chosen,
        kept,
        None if ranking.how else values,
        replace(budget, scope="axis") if by_share else budget,
        alone=alone,
        tokens=ranking.tokens,
        metrics=ranking.metrics,
        metric=None if ranking.how else ranking.shown or ranking.metric,
        how=ranking.how,
        origin=ranking.origin,
        thresholds={} if budget.groups > 1 or budget.released else thetas,
    )
    default = " (default)" if ranking.is_default else ""
    said = ranking.how or f"by {ranking.metric}{default}{ranking.note}"
    where = f", from {', '.join(map(str, ranking.files))}" if ranking.files else ""
    ranked = "" if ranking.how else f": {budget.words(axes[0].kind)[0]}"
    lines = [f"{options.UNITS.capitalize()}{of} {said}{where}{ranked}."]
    if not options.has_amount:
        least = "at least " if isinstance(options, ExpertOptions) else ""
        lines.insert(0, f"No `ratio` given: removing {least}{budget.ratio:.0%} of the {options.UNITS}.")
    gone, held = num_removed(chosen, kept), held_in(chosen)
    if budget.even is not None:
        asked, each = budget.removed(chosen), len(kept[chosen[0].name])
        many = f"{gone} of {held} {options.UNITS} are removed ({gone / held:.0%}), {asked} were asked for: "
        lines.append(
            f"{'' if gone == asked else many}{each} {options.UNITS} are kept in every {HOLDERS[chosen[0].kind]}; "
            f"a stock model may keep {', '.join(map(str, budget.even))}."
        )
    if thetas:
        named = ", ".join(f"{theta:.4f} ({part})" for part, theta in thetas.items())
        counted = ", counted as in the authors' released code" if budget.released else ""
        lines.append(f"Threshold theta: {named}{counted}.")
    arguments = {
        **options.recorded(),
        **arguments,
        "seed": options.seed if options.metric == "random" else None,
    }
    if "removed" in arguments:
        arguments["removed"] = gone
    return selection_of(
        options,
        checkpoint,
        axes,
        decision,
        arguments,
        ranking.files,
        reasons=[*lines, *([MIXED] if ranking.mixed else []), *reasons],
        notes=notes,
        details={"thresholds": thetas} if thetas else {},
    )
