"""The section of quality: scores of checkpoints beside their size and speed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from prunecli.analysis.removed import Removed, Unit, removed
from prunecli.evaluation.significance import LEAST
from prunecli.report.charts import Point, Series, chart
from prunecli.report.collect import ReportData
from prunecli.report.facts import LOWER_IS_BETTER, Row, rows_of, shown_scores
from prunecli.report.history import original
from prunecli.report.markup import Html, element, join, maybe, millions, row_of, table
from prunecli.results.document import numbers
from prunecli.results.evaluation import Evaluated, Evaluation, Score
from prunecli.tensors.quantities import bytes_text, counted

MOST_PAIRS, MOST_CHECKPOINTS = 40, 8
"""Scores by pair are listed for at most so many."""


def quality_section(data: ReportData) -> Html | None:
    """For each evaluation.json charts and tables; None where there is none."""
    files = data.of(Evaluation)
    if not files:
        return None
    return join([_evaluation(name, evaluation, rows_of(evaluation, data)) for name, evaluation in files])


def _evaluation(name: str, evaluation: Evaluation, rows: Sequence[Row]) -> Html:
    known = shown_scores(evaluation.task)
    scores = {key: score for key, score in known.items() if any(key in row.scores for row in rows)}
    unit, lost = _lost(rows)
    first = next(iter(scores), None)
    charts = [
        *([] if first is None else _charts(first, scores[first], rows, unit, lost)),
        *_by_position(rows),
    ]
    by_pair = bool(scores) and 1 < len(evaluation.pairs) <= MOST_PAIRS and len(rows) <= MOST_CHECKPOINTS
    return join(
        [
            element("h3", name),
            element("p", _about(evaluation)),
            *([row_of(*charts)] if charts else []),
            _table(evaluation, rows, scores, unit, lost),
            *([_by_pair(evaluation, rows, str(first), scores[str(first)])] if by_pair else []),
            *([_by_text(rows, scores)] if any(row.result.by_text for row in rows) else []),
            *([_examples(evaluation)] if evaluation.examples else []),
        ]
    )


def _examples(evaluation: Evaluation) -> Html:
    """Inputs and references, and the outputs of the checkpoints beside one another."""
    labels = dict.fromkeys(label for example in evaluation.examples for label in example.outputs)
    outputs = {label: lambda example, label=label: example.outputs.get(label) for label in labels}
    columns = {
        "input": lambda example: example.source,
        "of": lambda example: example.pair or example.text,
        "reference": lambda example: example.reference,
    }
    return table("Examples of outputs", evaluation.examples, columns | outputs, text_columns=3 + len(labels))


def _about(evaluation: Evaluation) -> str:
    data, pairs = numbers(evaluation.data), evaluation.pairs
    split = evaluation.data.get("split")
    said = [f"Task: {evaluation.task}"]
    if isinstance(split, str):
        said.append(f"split {split}")
    if pairs:
        said.append(", ".join(pairs[:3]) + ("…" if len(pairs) > 3 else ""))
    if len(pairs) > 1:
        said.append(counted(len(pairs), "pair"))
    unit = "sentence" if "sentences" in data else "text"
    if f"{unit}s" in data:
        said.append(counted(int(data[f"{unit}s"]), unit))
    test = evaluation.significance or {}
    tested = f" Tested against {test.get('baseline')}: {test.get('test')}." if test else ""
    return f"{'; '.join(said)}.{tested}"


def _lost(rows: Sequence[Row]) -> tuple[Unit, dict[int, Removed]]:
    """What was removed, by index of the row: of what could be opened, and of originals of these, wherever they lie."""
    opened = {index: row.entry for index, row in enumerate(rows) if row.entry is not None}
    if not opened:
        return "parameters", {}
    unit, losses = removed([entry.checkpoint for entry in opened.values()], rows[0].parameters)
    if unit == "parameters" and rows[0].parameters is None:  # they are counted against the first
        return unit, {}
    lost = dict(zip(opened, losses, strict=True))
    for index, row in enumerate(rows):
        derived = [i for i, entry in opened.items() if row.fingerprint and entry.history]
        reduced = [i for i in derived if original(opened[i])[1] == row.fingerprint]
        if index not in opened and reduced:
            lines = dict.fromkeys(line for i in reduced for line in lost[i].lines)
            lost[index] = Removed(0.0, tuple(lines), is_original=True)
    return unit, lost


def _charts(key: str, score: Score, rows: Sequence[Row], unit: Unit, lost: dict[int, Removed]) -> list[Html]:
    name = score.title
    y_name = f"{name} (lower is better)" if key in LOWER_IS_BETTER else name
    scored = {index: row for index, row in enumerate(rows) if key in row.scores}
    by_share = {index: 100 * lost[index].fraction for index in scored if index in lost}
    by_size = {i: row.parameters / 1e6 for i, row in scored.items() if row.parameters is not None}
    by_speed = {i: row.timed.timings[0].rate[1].median for i, row in scored.items() if row.timed}
    units = {row.timed.timings[0].rate[0] for row in scored.values() if row.timed}
    axes = [
        (f"{name} against the {unit} removed", by_share, f"% of {unit} removed"),
        (f"{name} against parameters", by_size, "million parameters"),
        (f"{name} against speed", by_speed, ", ".join(sorted(units))),
    ]
    return [
        chart(
            caption, _series(rows, values, lost, key, joined=values is not by_speed), x_name, y_name, zero="x"
        )
        for caption, values, x_name in axes[unit == "parameters" :]
        if len(values) > 1
    ]


def _series(
    rows: Sequence[Row], values: dict[int, float], lost: dict[int, Removed], score: str, joined: bool
) -> list[Series]:
    """A series for each way in which checkpoints were reduced, of the rows that have `values` for the x axis.

    Where `joined`, a series that has several amounts of one reduction is a line, which starts at its original.
    """
    points = {i: Point(x, rows[i].scores[score], rows[i].result.checkpoint) for i, x in values.items()}
    originals = [index for index in points if index in lost and lost[index].is_original]
    members: dict[str, list[int]] = {}
    for index in points:
        if index in lost and index not in originals:
            members.setdefault(lost[index].lines[0], []).append(index)
    series, started = [], set[int]()
    for line, own in members.items():
        is_line = joined and len({values[index] for index in own}) > 1
        starts = [index for index in originals if is_line and line in lost[index].lines]
        started.update(starts)
        ordered = sorted([*starts, *own], key=lambda index: (values[index], index))
        series.append(Series(line or "reduced", tuple(points[i] for i in ordered), is_line))
    others = {
        "not reduced": [index for index in originals if index not in started],
        "not in this directory": [index for index in points if index not in lost],
    }
    return series + [Series(name, tuple(points[i] for i in own)) for name, own in others.items() if own]


def _table(
    evaluation: Evaluation,
    rows: Sequence[Row],
    scores: Mapping[str, Score],
    unit: Unit,
    lost: dict[int, Removed],
) -> Html:
    caption = "Quality, size and speed" + ("; scores are means over the pairs" if evaluation.pairs else "")
    fractions = {id(rows[index]): loss.fraction for index, loss in lost.items()}
    units = {row.timed.timings[0].rate[0].replace(" per second", "/s") for row in rows if row.timed}
    cells = {
        score.title: lambda row, key=key, score=score: _cell(key, score, row.scores)
        for key, score in scores.items()
    }
    return table(
        caption,
        rows,
        {
            "checkpoint": lambda row: row.result.checkpoint,
            f"{unit} removed": lambda row: maybe("{:.1%}".format, fractions.get(id(row))),
            "parameters": lambda row: maybe(millions, row.parameters),
            "size": lambda row: maybe(bytes_text, row.bytes),
        }
        | cells
        | {
            "difference": lambda row: _test(row.result, evaluation),
            ", ".join(sorted(units)): lambda row: row.timed and row.timed.timings[0].rate[1].text(1),
            "speed-up": lambda row: row.timed and row.timed.timings[0].speedup.text(2),
            "remark": lambda row: "noisy" if row.timed and row.timed.timings[0].is_noisy else None,
        },
    )


def _by_pair(evaluation: Evaluation, rows: Sequence[Row], key: str, score: Score) -> Html:
    columns = {
        row.result.checkpoint: lambda pair, row=row: _cell(
            key, score, numbers(row.result.pairs.get(pair, {}))
        )
        for row in rows
    }
    return table(f"{score.title} by pair", evaluation.pairs, {"pair": lambda pair: pair} | columns)


def _by_text(rows: Sequence[Row], scores: Mapping[str, Score]) -> Html:
    """Scores on the texts of one name, a row for each checkpoint."""
    members = [
        (name, row, numbers(row.result.by_text[name]))
        for name in dict.fromkeys(name for row in rows for name in row.result.by_text)
        for row in rows
        if name in row.result.by_text
    ]
    cells = {
        score.title: lambda member, key=key, score=score: _cell(key, score, member[2])
        for key, score in scores.items()
    }
    heads = {"text": lambda member: member[0], "checkpoint": lambda member: member[1].result.checkpoint}
    return table("Quality by text", members, heads | cells)


def _by_position(rows: Sequence[Row]) -> list[Html]:
    """Divergence against how many tokens come before (2510.13999, Figure 4c)."""
    series = []
    for row in rows:
        spans = [numbers(span) for span in row.result.scores.get("by_position", [])]
        label = row.result.checkpoint
        points = [Point(math.log2(span["first"]), span["kl_divergence"], label) for span in spans]
        series += [Series(label, tuple(points), joined=True)] if len(points) > 1 else []
    if not series:
        return []
    name = "KL divergence, nats"
    return [
        chart(f"{name} by position", series, "tokens before, log₂", f"{name} (lower is better)", named=False)
    ]


def _cell(key: str, score: Score, scores: Mapping[str, float]) -> str | None:
    """The score as it is shown; None where it is not among `scores`."""
    return format(scores[key], score.form) if key in scores else None


def _test(result: Evaluated, evaluation: Evaluation) -> str | None:
    """The p-value of a single test, or how many pairs are significantly worse and better."""
    data = numbers(evaluation.data) | numbers(evaluation.significance or {})
    examples = data.get("examples", data.get("sentences", data.get("texts", LEAST)))
    if evaluation.task != "classification" and examples < LEAST:
        return None
    if result.p_value is not None:
        return _p_text(result.p_value)
    if len(result.pairs) == 1:
        (pair,) = result.pairs.values()
        tested = _numbers_at(pair, "bootstrap")
        return _p_text(tested["p_value"]) if "p_value" in tested else None
    counts = _numbers_at(result.mean, "significant")
    if not {"worse", "better"} <= counts.keys():
        return None
    return f"{counts['worse']:.0f} worse, {counts['better']:.0f} better of {len(evaluation.pairs)}"


def _numbers_at(values: Mapping[str, Any], key: str) -> dict[str, float]:
    """The numbers at `key` that are about chrF++."""
    by_score = values.get(key)
    chrf = by_score.get("chrf++") if isinstance(by_score, dict) else None
    return numbers(chrf) if isinstance(chrf, dict) else {}


def _p_text(value: float) -> str:
    return "p < 0.001" if value < 0.001 else f"p = {value:.3f}"
