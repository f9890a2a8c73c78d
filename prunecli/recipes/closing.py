"""The table at the end of a recipe: size, quality and speed of each checkpoint, and how far it is from the first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from prunecli.errors import UnsupportedModelError
from prunecli.model.checkpoint import open_model
from prunecli.model.opening import shim_classes
from prunecli.recipes.engine import Report
from prunecli.results.document import Document, numbers, with_fingerprints
from prunecli.results.evaluation import SCORES, Evaluated, Evaluation, percent
from prunecli.results.latency import Latency, Timed, Timing
from prunecli.tensors.json_files import read_json
from prunecli.tensors.quantities import bytes_text

NOTHING = "-"
"""A cell without a value."""
D = TypeVar("D", bound=Document)
R = TypeVar("R", Evaluated, Timed)


@dataclass(frozen=True)
class Cell:
    """A value as text, and what it differs by from the first row's where that says more."""

    value: str
    difference: str = ""


Column = Mapping[Path, Cell]
"""Checkpoint -> its cell; those without a value are missing."""


@dataclass(frozen=True)
class _Row:
    """What the headers of a checkpoint say, and what results call it."""

    path: Path
    label: str
    fingerprint: str
    experts: int | None
    parameters: int
    bytes: int


def closing_table(report: Report) -> tuple[list[str], list[list[str]]]:
    """The columns and the rows of the table, one row per checkpoint; columns without numbers are left out.

    Scores are means over the language pairs, or of each text by its name. Speed is that of the first batch size, with
    its deviation over the runs, as medians; above 20 % a remark calls it noisy.

    Raises:
        PruneError: a file that is damaged or of another kind, or no checkpoint where there should be one.
    """
    from prunecli.evaluation.options import labels_for  # imports torch, which a run itself has no need of

    rows = [_row(path, label) for label, path in labels_for([*report.checkpoints.values()]).items()]
    columns = dict(_sizes(rows))
    for file in report.evaluations:
        evaluation = _read(file, Evaluation)
        results = _by_path(evaluation, evaluation.results, rows)
        columns |= dict(_scores(evaluation, results, rows[0].path))
    if report.latency is not None:
        latency = _read(report.latency, Latency)
        columns |= dict(_speeds(_by_path(latency, latency.results, rows)))
    shown = {title: _texts(rows, column) for title, column in columns.items() if column}
    return ["checkpoint", *shown], [
        [name, *(texts[index] for texts in shown.values())] for index, name in enumerate(report.checkpoints)
    ]


def needing_prunecli(report: Report) -> list[str]:
    """Names of the rows whose models open only where prunecli is installed."""
    names = []
    for name, path in report.checkpoints.items():
        with open_model(path) as checkpoint:
            names += [name] if shim_classes(checkpoint.config) else []
    return names


def _row(path: Path, label: str) -> _Row:
    with open_model(path) as checkpoint:
        try:
            experts: int | None = sum(layer.num_experts for layer in checkpoint.require_mixtures())
        except UnsupportedModelError:  # a model without experts has sizes all the same
            experts = None
        sizes = checkpoint.total_parameters, checkpoint.total_bytes
        return _Row(path, label, checkpoint.fingerprint, experts, *sizes)


def _texts(rows: Sequence[_Row], column: Column) -> list[str]:
    """A column's cells; the differences stand below one another."""
    cells = [column.get(row.path, Cell(NOTHING)) for row in rows]
    width = max(len(cell.difference) for cell in cells)
    if not width:
        return [cell.value for cell in cells]
    return [f"{cell.value}  {cell.difference or NOTHING:>{width}}" for cell in cells]


def _read(path: Path, kind: type[D]) -> D:
    return kind.from_json(read_json(path, kind.FORMAT), path)


def _by_path(document: Document, results: Sequence[R], rows: Sequence[_Row]) -> dict[Path, R]:
    """Checkpoint -> its result: of its weights, where the file names these; of several the one of its label."""
    found = {}
    for row in rows:
        same = [
            result
            for result, own in with_fingerprints(document, results)
            if own == row.fingerprint or (not own and result.checkpoint == row.label)
        ]
        if same:
            found[row.path] = min(same, key=lambda result: result.checkpoint != row.label)
    return found


def _sizes(rows: Sequence[_Row]) -> Iterator[tuple[str, Column]]:
    def cell(text: str, value: int, first: int) -> Cell:
        return Cell(text, "" if value == first else percent(value, first))

    first = rows[0]
    yield "experts", {row.path: Cell(f"{row.experts:,}") for row in rows if row.experts is not None}
    yield (
        "parameters",
        {row.path: cell(f"{row.parameters / 1e6:,.2f}M", row.parameters, first.parameters) for row in rows},
    )
    yield "size", {row.path: cell(bytes_text(row.bytes), row.bytes, first.bytes) for row in rows}


def _scores(
    evaluation: Evaluation, results: Mapping[Path, Evaluated], baseline: Path
) -> Iterator[tuple[str, Column]]:
    """A column for each score of the task, and of each text that has a name."""
    by_text = {path: result.by_text or {"": result.scores or result.mean} for path, result in results.items()}
    for text in dict.fromkeys(text for own in by_text.values() for text in own):
        own = {path: numbers(scores.get(text, {})) for path, scores in by_text.items()}
        for name, score in SCORES.get(evaluation.task, {}).items():
            if score.closing:
                title = f"{text}\n{score.title}" if text else score.title
                first = None if score.of_two else own.get(baseline, {}).get(name)
                yield (
                    title,
                    {
                        path: Cell(
                            format(scores[name], score.form),
                            ""
                            if first is None or path == baseline
                            else score.difference(scores[name], first),
                        )
                        for path, scores in own.items()
                        if name in scores
                    },
                )


def _speeds(results: Mapping[Path, Timed]) -> Iterator[tuple[str, Column]]:
    """Of the first batch size: a column for what counts at this task, and one against the first; of a language model
    of reading and of writing.
    """
    timings = {path: _first_batch(result.timings) for path, result in results.items()}
    for phase in dict.fromkeys(phase for own in timings.values() for phase in own):
        own = {path: by_phase[phase] for path, by_phase in timings.items() if phase in by_phase}
        head = f"{phase}\n" if phase else ""
        (unit,) = {timing.rate[0] for timing in own.values()}
        yield (
            f"{head}{unit.replace(' per second', '/s')}",
            {path: Cell(timing.rate[1].text(0)) for path, timing in own.items()},
        )
        yield f"{head}speed-up", {path: Cell(timing.speedup.text(2)) for path, timing in own.items()}
        noisy = {path: Cell("noisy") for path, timing in own.items() if timing.is_noisy}
        yield f"{head}remark", noisy


def _first_batch(timings: Sequence[Timing]) -> dict[str, Timing]:
    """Phase, or nothing, -> its timing at the first batch size and beam."""
    first: dict[str, Timing] = {}
    for timing in timings:
        first.setdefault(timing.phase or "", timing)
    return first
