"""The page's section on quality: scores of checkpoints against size and speed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prunecli.analysis.removed import Removed, Unit, removed
from prunecli.evaluation.significance import LEAST
from prunecli.report.charts import Picture, Point, curves
from prunecli.report.collect import ReportData
from prunecli.report.facts import LOWER_IS_BETTER, Row, rows_of, shown_scores
from prunecli.report.history import original
from prunecli.report.pictures import reduction_curves
from prunecli.report.render import Block, Heading, Pictures, Table, Text, maybe, table
from prunecli.results.document import numbers
from prunecli.results.evaluation import Evaluated, Evaluation, Score
from prunecli.tensors.quantities import bytes_text, counted

MOST_PAIRS, MOST_CHECKPOINTS = 40, 8
"""Scores by pair are listed for at most so many."""


def quality_section(data: ReportData) -> Iterator[Block]:
    """Yield charts and tables of each evaluation.json."""
    for name, evaluation in data.of(Evaluation):
        yield from _evaluation(name, evaluation, rows_of(evaluation, data))


def _evaluation(name: str, evaluation: Evaluation, rows: Sequence[Row]) -> Iterator[Block]:
    known = shown_scores(evaluation.task)
    scores = {key: score for key, score in known.items() if any(key in row.scores for row in rows)}
    unit, lost = _lost(rows)
    yield Heading(name)
    yield Text(_about(evaluation))
    first = next(iter(scores), None)
    charts = [
        *([] if first is None else _charts(first, scores[first], rows, unit, lost)),
        *_by_position(rows),
    ]
    if charts:
        yield Pictures(charts)
    yield _table(evaluation, rows, scores, unit, lost)
    if first is not None and 1 < len(evaluation.pairs) <= MOST_PAIRS and len(rows) <= MOST_CHECKPOINTS:
        by_pair = [
            {
                "pair": pair,
                **{
                    row.result.checkpoint: _cell(first, scores[first], row.result.pairs.get(pair, {}))
                    for row in rows
                },
            }
            for pair in evaluation.pairs
        ]
        yield table(f"{scores[first].title} by pair", by_pair)
    names = dict.fromkeys(text for row in rows for text in row.result.by_text)
    by_text = [
        {"text": text, "checkpoint": row.result.checkpoint, **_cells(scores, row.result.by_text[text])}
        for text in names
        for row in rows
        if text in row.result.by_text
    ]
    if by_text:
        yield table("Quality by text", by_text)
    if evaluation.examples:
        labels = dict.fromkeys(label for example in evaluation.examples for label in example.outputs)
        examples = [
            {"input": one.source, "of": one.pair or one.text, "reference": one.reference}
            | {label: one.outputs.get(label) for label in labels}
            for one in evaluation.examples
        ]
        yield table("Examples of outputs", examples, text_columns=3 + len(labels))


def _about(evaluation: Evaluation) -> str:
    data, pairs = numbers(evaluation.data), evaluation.pairs
    split = evaluation.data.get("split")
    parts = [f"Task: {evaluation.task}"]
    if isinstance(split, str):
        parts.append(f"split {split}")
    if pairs:
        parts.append(", ".join(pairs[:3]) + ("…" if len(pairs) > 3 else ""))
    if len(pairs) > 1:
        parts.append(counted(len(pairs), "pair"))
    unit = "sentence" if "sentences" in data else "text"
    if f"{unit}s" in data:
        parts.append(counted(int(data[f"{unit}s"]), unit))
    test = evaluation.significance or {}
    tested = f" Tested against {test.get('baseline')}: {test.get('test')}." if test else ""
    return f"{'; '.join(parts)}.{tested}"


def _lost(rows: Sequence[Row]) -> tuple[Unit, dict[int, Removed]]:
    """Return what was removed from each row's checkpoint, by index of the row.

    Checkpoints that cannot be opened are left out, except originals of those that can.
    """
    opened = {index: row.entry for index, row in enumerate(rows) if row.entry is not None}
    if not opened:
        return "parameters", {}
    unit, losses = removed([entry.checkpoint for entry in opened.values()], rows[0].parameters)
    if unit == "parameters" and rows[0].parameters is None:  # fractions are relative to the first checkpoint
        return unit, {}
    lost = dict(zip(opened, losses, strict=True))
    for index, row in enumerate(rows):
        derived = [i for i, entry in opened.items() if row.fingerprint and entry.history]
        reduced = [i for i in derived if original(opened[i])[1] == row.fingerprint]
        if index not in opened and reduced:
            lines = dict.fromkeys(line for i in reduced for line in lost[i].lines)
            lost[index] = Removed(0.0, tuple(lines), is_original=True)
    return unit, lost


def _charts(
    key: str, score: Score, rows: Sequence[Row], unit: Unit, lost: dict[int, Removed]
) -> Iterator[Picture]:
    name = score.title
    y_title = f"{name} (lower is better)" if key in LOWER_IS_BETTER else name
    scored = {index: row for index, row in enumerate(rows) if key in row.scores}
    timed = {index: row.timed.timings[0].rate for index, row in scored.items() if row.timed}
    by_share = {index: 100 * lost[index].fraction for index in scored if index in lost}
    by_size = {index: row.parameters / 1e6 for index, row in scored.items() if row.parameters is not None}
    by_speed = {index: spread.median for index, (_, spread) in timed.items()}
    axes: list[tuple[str, dict[int, float], str]] = [
        (f"{name} against the {unit} removed", by_share, f"% of {unit} removed"),
        (f"{name} against parameters", by_size, "million parameters"),
        (f"{name} against speed", by_speed, ", ".join(sorted({rate for rate, _ in timed.values()}))),
    ]
    for caption, values, x_title in axes[unit == "parameters" :]:
        if len(values) > 1:
            points = {i: Point(x, rows[i].scores[key], rows[i].result.checkpoint) for i, x in values.items()}
            joined = values is not by_speed
            titles = (x_title, y_title)
            yield reduction_curves(caption, points, lost, titles, least=2, is_joined=joined, has_names=True)


def _by_position(rows: Sequence[Row]) -> list[Picture]:
    """Return the chart of divergence by position (2510.13999, Figure 4c), if it was measured."""
    points = []
    for row in rows:
        spans = [numbers(span) for span in row.result.scores.get("by_position", [])]
        label = row.result.checkpoint
        own = [Point(math.log2(span["first"]), span["kl_divergence"], label, label) for span in spans]
        points += own if len(own) > 1 else []
    if not points:
        return []
    name, names = "KL divergence, nats", {point.series for point in points}
    titles = "tokens before, log₂", f"{name} (lower is better)"
    return [curves(f"{name} by position", points, *titles, joined=names)]


def _table(
    evaluation: Evaluation,
    rows: Sequence[Row],
    scores: Mapping[str, Score],
    unit: Unit,
    lost: dict[int, Removed],
) -> Table:
    caption = "Quality, size and speed" + ("; scores are means over the pairs" if evaluation.pairs else "")
    units = sorted({row.timed.timings[0].rate[0].replace(" per second", "/s") for row in rows if row.timed})
    cells = []
    for index, row in enumerate(rows):
        timing = row.timed.timings[0] if row.timed else None
        cells.append(
            {
                "checkpoint": row.result.checkpoint,
                f"{unit} removed": f"{lost[index].fraction:.1%}" if index in lost else None,
                "parameters": maybe(millions, row.parameters),
                "size": maybe(bytes_text, row.bytes),
                **_cells(scores, row.scores),
                "difference": _test(row.result, evaluation),
                ", ".join(units): None if timing is None else timing.rate[1].text(1),
                "speed-up": None if timing is None else timing.speedup.text(2),
                "remark": "noisy" if timing and timing.is_noisy else None,
            }
        )
    return table(caption, cells)


def millions(parameters: int) -> str:
    """Format a number of parameters: 2430000 -> '2.43M'."""
    return f"{parameters / 1e6:,.2f}M"


def _cells(scores: Mapping[str, Score], values: Mapping[str, Any]) -> dict[str, str | None]:
    return {score.title: _cell(key, score, values) for key, score in scores.items()}


def _cell(key: str, score: Score, values: Mapping[str, Any]) -> str | None:
    return maybe(f"{{:{score.form}}}", numbers(values).get(key))


def _test(result: Evaluated, evaluation: Evaluation) -> str | None:
    """Return the p-value of a single test, or the number of pairs that are significantly worse and better."""
    data = numbers(evaluation.data) | numbers(evaluation.significance or {})
    examples = data.get("examples", data.get("sentences", data.get("texts", LEAST)))
    if evaluation.task != "classification" and examples < LEAST:
        return None
    if result.p_value is not None:
        return _p_text(result.p_value)
    if len(result.pairs) == 1:
        (pair,) = result.pairs.values()
        return maybe(_p_text, _chrf_numbers(pair, "bootstrap").get("p_value"))
    counts = _chrf_numbers(result.mean, "significant")
    if not {"worse", "better"} <= counts.keys():
        return None
    return f"{counts['worse']:.0f} worse, {counts['better']:.0f} better of {len(evaluation.pairs)}"


def _chrf_numbers(values: Mapping[str, Any], key: str) -> dict[str, float]:
    by_score = values.get(key)
    chrf = by_score.get("chrf++") if isinstance(by_score, dict) else None
    return numbers(chrf) if isinstance(chrf, dict) else {}


def _p_text(value: float) -> str:
    return "p < 0.001" if value < 0.001 else f"p = {value:.3f}"
