"""The section of quality: scores of checkpoints beside their size and speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prunecli.analysis.removed import Removed, Unit, removed
from prunecli.evaluation.significance import LEAST
from prunecli.model.checkpoint import Checkpoint
from prunecli.report.charts import Point, Series, chart
from prunecli.report.collect import Found, Material
from prunecli.report.markup import NOTHING, Html, counted, element, join, millions, table
from prunecli.results.schemas import Evaluated, Evaluation, Latency, Timed, numbers
from prunecli.tensors.quantities import bytes_text

SCORES = {
    "chrf++": "chrF++",
    "bleu": "BLEU",
    "spbleu": "spBLEU",
    "accuracy": "accuracy",
    "f1": "macro F1",
    "perplexity": "perplexity",
    "bits_per_byte": "bits per byte",
    "loss": "loss",
    "length_ratio": "length",
    "over_generated": "over-generated",
}
"""Those shown, in this order; the first that a file has is drawn."""
LOWER_IS_BETTER = {"perplexity", "bits_per_byte", "loss"}
MOST_PAIRS, MOST_CHECKPOINTS = 40, 8
"""Scores by pair are listed for at most so many."""


@dataclass(frozen=True)
class Row:
    """One evaluated checkpoint, and what else is known of it.

    Attributes:
        result: of evaluation.json.
        fingerprint: of the checkpoint; "" where the file does not say it.
        found: the checkpoint, where it could be opened.
        timed: its speed, where a latency.json has it.
    """

    result: Evaluated
    fingerprint: str
    found: Found | None
    timed: Timed | None

    @property
    def scores(self) -> dict[str, float]:
        """Name -> mean score."""
        return numbers(self.result.scores or self.result.mean)

    @property
    def parameters(self) -> int | None:
        """From the headers, else as the quality or the speed was measured."""
        if self.found is not None:
            return self.found.inventory.total.parameters
        if self.result.parameters is not None:
            return self.result.parameters
        return None if self.timed is None else self.timed.parameters

    @property
    def bytes(self) -> int | None:
        """Of the weights, likewise."""
        if self.found is not None:
            return self.found.inventory.total.bytes
        if self.result.checkpoint_bytes is not None:
            return self.result.checkpoint_bytes
        return None if self.timed is None else self.timed.checkpoint_bytes


def quality_section(material: Material) -> Html | None:
    """For each evaluation.json charts and tables; None where there is none."""
    files = material.of(Evaluation)
    if not files:
        return None
    speeds = [speed for _, speed in material.of(Latency)]
    return join([_evaluation(name, found, _rows(found, material, speeds)) for name, found in files])


def _rows(evaluation: Evaluation, material: Material, speeds: Sequence[Latency]) -> list[Row]:
    rows = []
    for index, result in enumerate(evaluation.results):
        models = evaluation.models
        fingerprint = models[index].fingerprint if len(models) == len(evaluation.results) else ""
        timed = next((one for speed in speeds for one in _timed(speed, result.checkpoint, fingerprint)), None)
        rows.append(Row(result, fingerprint, material.known(result.checkpoint, fingerprint), timed))
    return rows


def _timed(speed: Latency, label: str, fingerprint: str) -> list[Timed]:
    """The times of this checkpoint: of one with this fingerprint, that of the same name first."""
    if not fingerprint or len(speed.models) != len(speed.results):
        return []
    same = [
        one
        for one, model in zip(speed.results, speed.models, strict=True)
        if model.fingerprint == fingerprint
    ]
    return sorted(same, key=lambda one: one.checkpoint != label)


def _evaluation(name: str, evaluation: Evaluation, rows: Sequence[Row]) -> Html:
    columns = [score for score in SCORES if any(score in row.scores for row in rows)]
    parts: list[Html] = [element("h3", name), element("p", _about(evaluation))]
    unit, lost = _lost(rows)
    if columns:
        charts = _charts(columns[0], rows, unit, lost)
        if charts:
            parts.append(element("div", *charts, class_="charts"))
    parts.append(_table(evaluation, rows, columns, unit, lost))
    if columns and 1 < len(evaluation.pairs) <= MOST_PAIRS and len(rows) <= MOST_CHECKPOINTS:
        parts.append(_by_pair(evaluation, rows, columns[0]))
    return join(parts)


def _about(evaluation: Evaluation) -> str:
    data = numbers(evaluation.data)
    texts = data.get("sentences", data.get("texts"))
    split = evaluation.data.get("split")
    said = [
        f"Task: {evaluation.task}",
        *([f"split {split}"] if isinstance(split, str) else []),
        *(
            [", ".join(evaluation.pairs[:3]) + ("…" if len(evaluation.pairs) > 3 else "")]
            if evaluation.pairs
            else []
        ),
        *([counted(len(evaluation.pairs), "pair")] if len(evaluation.pairs) > 1 else []),
        *([counted(int(texts), "sentence" if "sentences" in data else "text")] if texts is not None else []),
    ]
    test = evaluation.significance or {}
    tested = f" Tested against {test.get('baseline')}: {test.get('test')}." if test else ""
    return f"{'; '.join(said)}.{tested}"


def _lost(rows: Sequence[Row]) -> tuple[Unit, dict[int, Removed]]:
    """What was removed, by place in the rows: of what could be opened, and of originals of these, wherever they lie."""
    held = {index: row.found.checkpoint for index, row in enumerate(rows) if row.found is not None}
    if not held:
        return "parameters", {}
    unit, found = removed(list(held.values()), rows[0].parameters)
    if unit == "parameters" and rows[0].parameters is None:  # they are counted against the first
        return unit, {}
    lost = dict(zip(held, found, strict=True))
    for index, row in enumerate(rows):
        made = [other for other, one in held.items() if row.fingerprint and _origin(one) == row.fingerprint]
        if index not in held and made:
            lines = dict.fromkeys(line for other in made for line in lost[other].lines)
            lost[index] = Removed(0.0, tuple(lines), is_original=True)
    return unit, lost


def _origin(checkpoint: Checkpoint) -> str | None:
    """The fingerprint of what its history began with."""
    history = checkpoint.structure.history
    source = history[0].get("source") if history else None
    return str(source.get("fingerprint")) if isinstance(source, Mapping) else None


def _charts(score: str, rows: Sequence[Row], unit: Unit, lost: dict[int, Removed]) -> list[Html]:
    better = " (lower is better)" if score in LOWER_IS_BETTER else ""
    what = SCORES[score] + better
    by_share = {index: 100 * one.fraction for index, one in lost.items()}
    by_size = {i: row.parameters / 1e6 for i, row in enumerate(rows) if row.parameters is not None}
    by_speed = {
        i: row.timed.timings[0].tokens_per_second.mean for i, row in enumerate(rows) if row.timed is not None
    }
    wanted = [
        (f"{SCORES[score]} against parameters", by_size, "million parameters", False),
        (f"{SCORES[score]} against speed", by_speed, "tokens per second", False),
    ]
    if unit != "parameters":
        wanted.insert(
            0, (f"{SCORES[score]} against the {unit} removed", by_share, f"% of {unit} removed", True)
        )
    made = []
    for caption, places, x_name, joined in wanted:
        known = {index: x for index, x in places.items() if score in rows[index].scores}
        if len(known) > 1:
            made.append(chart(caption, _series(rows, known, lost, score, joined), x_name, what, zero="x"))
    return made


def _series(
    rows: Sequence[Row], places: dict[int, float], lost: dict[int, Removed], score: str, joined: bool
) -> list[Series]:
    """A series for each way in which checkpoints were reduced; joined, an original starts the lines of what was made of
    it."""
    lines = list(dict.fromkeys(line for one in lost.values() if not one.is_original for line in one.lines))
    points = {
        index: Point(x, rows[index].scores[score], rows[index].result.checkpoint)
        for index, x in places.items()
    }
    whole = [index for index in points if index in lost and lost[index].is_original]
    found, started = [], set()
    for line in lines:
        own = [index for index in points if index in lost and line in lost[index].lines]
        own = [index for index in own if joined or index not in whole]
        own.sort(key=lambda index: (places[index], index))
        started |= set(own)
        found.append(Series(line or "reduced", tuple(points[index] for index in own), joined))
    others = {
        "not reduced": [index for index in whole if index not in started],
        "not in this directory": [index for index in points if index not in lost],
    }
    return found + [
        Series(name, tuple(points[index] for index in own)) for name, own in others.items() if own
    ]


def _table(
    evaluation: Evaluation, rows: Sequence[Row], columns: Sequence[str], unit: Unit, lost: dict[int, Removed]
) -> Html:
    cells: list[list[str]] = []
    for index, row in enumerate(rows):
        scores = row.scores
        cells.append(
            [
                row.result.checkpoint,
                f"{lost[index].fraction:.1%}" if index in lost else NOTHING,
                NOTHING if row.parameters is None else millions(row.parameters),
                NOTHING if row.bytes is None else bytes_text(row.bytes),
                *(_score(name, scores[name]) if name in scores else NOTHING for name in columns),
                _test(row.result, evaluation),
                *_speed(row.timed),
            ]
        )
    names = [
        "checkpoint", f"{unit} removed", "parameters", "size", *(SCORES[name] for name in columns),
        "difference", "tokens/s", "speed-up",
    ]  # fmt: skip
    caption = (
        "Quality, size and speed; scores are means over the pairs"
        if evaluation.pairs
        else "Quality, size and speed"
    )
    return table(caption, names, cells)


def _score(name: str, value: float) -> str:
    if name == "over_generated":
        return f"{value:.1%}"
    digits = {"chrf++": 1, "bleu": 1, "spbleu": 1, "length_ratio": 2}.get(name)
    return f"{value:,.4g}" if digits is None else f"{value:,.{digits}f}"


def _test(result: Evaluated, evaluation: Evaluation) -> str:
    """The p-value of a single test, or how many pairs are significantly worse and better."""
    data = numbers(evaluation.data)
    if evaluation.task != "classification" and data.get("sentences", data.get("texts", LEAST)) < LEAST:
        return NOTHING
    if result.p_value is not None:
        return _p(result.p_value)
    if len(result.pairs) == 1:
        tested = next(iter(result.pairs.values())).get("bootstrap")
        values = tested.get("chrf++") if isinstance(tested, dict) else None
        found = numbers(values) if isinstance(values, dict) else {}
        return _p(found["p_value"]) if "p_value" in found else NOTHING
    counts: Any = result.mean.get("significant")
    counts = counts.get("chrf++") if isinstance(counts, dict) else None
    found = numbers(counts) if isinstance(counts, dict) else {}
    if not {"worse", "better"} <= set(found):
        return NOTHING
    return f"{found['worse']:.0f} worse, {found['better']:.0f} better of {len(evaluation.pairs)}"


def _p(value: float) -> str:
    return "p < 0.001" if value < 0.001 else f"p = {value:.3f}"


def _speed(timed: Timed | None) -> list[str]:
    if timed is None:
        return [NOTHING, NOTHING]
    first = timed.timings[0]
    return [
        f"{first.tokens_per_second.mean:,.1f} ± {first.tokens_per_second.std:,.1f}",
        f"{first.speedup.mean:.2f} ± {first.speedup.std:.2f}",
    ]


def _by_pair(evaluation: Evaluation, rows: Sequence[Row], score: str) -> Html:
    scored = [{pair: numbers(found) for pair, found in row.result.pairs.items()} for row in rows]
    lines = [
        [
            pair,
            *(_score(score, one[pair][score]) if score in one.get(pair, {}) else NOTHING for one in scored),
        ]
        for pair in evaluation.pairs
    ]
    return table(f"{SCORES[score]} by pair", ["pair", *(row.result.checkpoint for row in rows)], lines)
