"""The table at the end of a recipe: size, quality and speed of each checkpoint, and the change from the first one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from prunecli.errors import UnsupportedModelError
from prunecli.model.checkpoint import open_model
from prunecli.model.opening import shim_classes
from prunecli.recipes.engine import Report
from prunecli.results.document import Document, Shown, millions, numbers, with_fingerprints
from prunecli.results.evaluation import SCORES, Evaluated, Evaluation, percent
from prunecli.results.latency import Latency, Timed
from prunecli.tensors.quantities import bytes_text

R = TypeVar("R", Evaluated, Timed)


class _Rows:
    """Rows of the table: the value of each cell, and its change from the first row."""

    def __init__(self) -> None:
        self.rows: list[dict[str, tuple[str | None, str]]] = []
        self._first: dict[str, float] = {}

    def add(
        self,
        title: str,
        text: str | None,
        value: float = 0,
        change: Callable[[float, float], str] | None = None,
    ) -> None:
        """Add a cell to the last row; without text it only gives the column its place."""
        if len(self.rows) == 1 and text is not None:
            self._first[title] = value
        known = text is not None and len(self.rows) > 1 and title in self._first
        self.rows[-1][title] = text, change(value, self._first[title]) if change and known else ""

    def texts(self, names: Sequence[str]) -> list[dict[str, str | None]]:
        """The rows as text; changes stand below one another."""
        titles = dict.fromkeys(title for row in self.rows for title in row)
        widths = {title: max(len(row[title][1]) for row in self.rows if title in row) for title in titles}
        found = []
        for name, row in zip(names, self.rows, strict=True):
            cells: dict[str, str | None] = {"checkpoint": name}
            for title, width in widths.items():
                text, change = row.get(title, (None, ""))
                cells[title] = f"{text}  {change or '-':>{width}}" if text and width else text
            found.append(cells)
        return found


def closing_table(report: Report) -> Shown:
    """Return the table, with a row for each checkpoint.

    Scores are means over the language pairs, or of each named text. Speeds are those of the first batch size, medians
    with deviations over the runs; a remark tells if they are noisy.

    Raises:
        PruneError: a file that is damaged or of another kind, or no checkpoint where there should be one.
    """
    from prunecli.evaluation.options import labels_for  # imports torch, which a run itself has no need of

    evaluations = [Evaluation.read(file) for file in report.evaluations]
    speeds = [] if report.latency is None else [Latency.read(report.latency)]
    table = _Rows()
    for label, path in labels_for([*report.checkpoints.values()]).items():
        table.rows.append({})
        fingerprint = _add_sizes(table, path)
        for evaluation in evaluations:
            for result in _of(evaluation, evaluation.results, label, fingerprint):
                for text, values in (result.by_text or {"": result.scores or result.mean}).items():
                    for name, score in SCORES.get(evaluation.task, {}).items():
                        title = f"{text}\n{score.title}" if text else score.title
                        value = numbers(values).get(name)
                        if score.closing and value is not None:
                            change = None if score.of_two else score.difference
                            table.add(title, format(value, score.form), value, change)
                        elif score.closing:
                            table.add(title, None)
        for latency in speeds:
            for timed in _of(latency, latency.results, label, fingerprint):
                for phase in dict.fromkeys(timing.phase for timing in timed.timings):
                    timing = next(one for one in timed.timings if one.phase == phase)
                    head = f"{phase}\n" if phase else ""
                    table.add(f"{head}{timing.rate[0].replace(' per second', '/s')}", timing.rate[1].text(0))
                    table.add(f"{head}speed-up", timing.speedup.text(2))
                    if timing.is_noisy:
                        table.add(f"{head}remark", "noisy")
    return Shown(report.title, table.texts([*report.checkpoints]))


def needing_prunecli(report: Report) -> list[str]:
    """Names of the rows whose models open only where prunecli is installed."""
    names = []
    for name, path in report.checkpoints.items():
        with open_model(path) as checkpoint:
            names += [name] if shim_classes(checkpoint.config) else []
    return names


def _add_sizes(table: _Rows, path: Path) -> str:
    """Add what the headers of a checkpoint tell; return its fingerprint."""

    def change(value: float, first: float) -> str:
        return "" if value == first else percent(value, first)

    with open_model(path) as checkpoint:
        try:
            experts = sum(layer.num_experts for layer in checkpoint.require_mixtures())
            table.add("experts", f"{experts:,}")
        except UnsupportedModelError:  # a model without experts has sizes all the same
            pass
        parameters, size = checkpoint.total_parameters, checkpoint.total_bytes
        table.add("parameters", millions(parameters), parameters, change)
        table.add("size", bytes_text(size), size, change)
        return checkpoint.fingerprint


def _of(document: Document, results: Sequence[R], label: str, fingerprint: str) -> list[R]:
    """The result of a checkpoint: by its fingerprint if the file states one; of several the one with its label."""
    same = [
        result
        for result, own in with_fingerprints(document, results)
        if own == fingerprint or (not own and result.checkpoint == label)
    ]
    return sorted(same, key=lambda result: result.checkpoint != label)[:1]
