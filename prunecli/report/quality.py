"""The section of quality: scores of checkpoints beside their size and speed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prunecli.analysis.removed import Removed, Unit, removed
from prunecli.evaluation.significance import LEAST
from prunecli.model.checkpoint import Checkpoint
from prunecli.report.charts import Point, Series, chart
from prunecli.report.collect import CheckpointEntry, ReportData
from prunecli.report.markup import Html, element, join, maybe, millions, row_of, table
from prunecli.results.document import numbers
from prunecli.results.evaluation import Evaluated, Evaluation
from prunecli.results.latency import Latency, Timed
from prunecli.tensors.quantities import bytes_text, counted

SCORES = {
    "chrf++": "chrF++",
    "chrf": "chrF",
    "bleu": "BLEU",
    "spbleu": "spBLEU",
    "comet": "COMET",
    "accuracy": "accuracy",
    "f1": "macro F1",
    "matthews": "Matthews correlation",
    "spearman": "Spearman's correlation",
    "retrieval": "retrieved",
    "cosine": "cosine to the first",
    "cosine_5_percent": "5% are below",
    "perplexity": "perplexity",
    "bits_per_byte": "bits per byte",
    "kl_divergence": "KL divergence, nats",
    "top1_agreement": "same top-1",
    "tokens_until_difference": "same tokens until",
    "equal_tokens": "same tokens",
    "loss": "loss",
    "length_ratio": "length",
    "over_generated": "over-generated",
}
"""Those shown, in this order; the first that a file has is drawn."""
LOWER_IS_BETTER = {"perplexity", "bits_per_byte", "kl_divergence", "loss"}
MOST_PAIRS, MOST_CHECKPOINTS = 40, 8
"""Scores by pair are listed for at most so many."""


@dataclass(frozen=True)
class Row:
    """One evaluated checkpoint, and what else is known of it.

    Attributes:
        result: of evaluation.json.
        fingerprint: of the checkpoint; "" where the file does not say it.
        entry: the checkpoint, where it could be opened.
        timed: its speed, where a latency.json has it.
    """

    result: Evaluated
    fingerprint: str
    entry: CheckpointEntry | None
    timed: Timed | None

    @property
    def scores(self) -> dict[str, float]:
        """Name -> mean score."""
        return numbers(self.result.scores or self.result.mean)

    @property
    def parameters(self) -> int | None:
        """From the headers, else as the quality or the speed was measured."""
        own = None if self.entry is None else self.entry.inventory.total.parameters
        return _known(own, self.result.parameters, None if self.timed is None else self.timed.parameters)

    @property
    def bytes(self) -> int | None:
        """Of the weights, likewise."""
        own = None if self.entry is None else self.entry.inventory.total.bytes
        return _known(
            own, self.result.checkpoint_bytes, None if self.timed is None else self.timed.checkpoint_bytes
        )


def _known(*values: int | None) -> int | None:
    return next((value for value in values if value is not None), None)


def quality_section(data: ReportData) -> Html | None:
    """For each evaluation.json charts and tables; None where there is none."""
    files = data.of(Evaluation)
    if not files:
        return None
    speeds = [latency for _, latency in data.of(Latency)]
    return join(
        [_evaluation(name, evaluation, _rows(evaluation, data, speeds)) for name, evaluation in files]
    )


def _rows(evaluation: Evaluation, data: ReportData, speeds: Sequence[Latency]) -> list[Row]:
    rows = []
    models = evaluation.models if len(evaluation.models) == len(evaluation.results) else None
    for index, result in enumerate(evaluation.results):
        fingerprint = "" if models is None else models[index].fingerprint or ""
        timed = next((row for speed in speeds for row in _timed(speed, result.checkpoint, fingerprint)), None)
        rows.append(Row(result, fingerprint, data.known(result.checkpoint, fingerprint), timed))
    return rows


def _timed(latency: Latency, label: str, fingerprint: str) -> list[Timed]:
    """The times of this checkpoint: of one with this fingerprint, that of the same name first."""
    if not fingerprint or len(latency.models) != len(latency.results):
        return []
    both = zip(latency.results, latency.models, strict=True)
    same = [result for result, model in both if model.fingerprint == fingerprint]
    return sorted(same, key=lambda result: result.checkpoint != label)


def _evaluation(name: str, evaluation: Evaluation, rows: Sequence[Row]) -> Html:
    scores = [score for score in SCORES if any(score in row.scores for row in rows)]
    unit, lost = _lost(rows)
    charts = [*(_charts(scores[0], rows, unit, lost) if scores else []), *_by_position(rows)]
    by_pair = bool(scores) and 1 < len(evaluation.pairs) <= MOST_PAIRS and len(rows) <= MOST_CHECKPOINTS
    return join(
        [
            element("h3", name),
            element("p", _about(evaluation)),
            *([row_of(*charts)] if charts else []),
            _table(evaluation, rows, scores, unit, lost),
            *([_by_pair(evaluation, rows, scores[0])] if by_pair else []),
            *([_by_text(rows, scores)] if any(row.result.by_text for row in rows) else []),
        ]
    )


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
    opened = {index: row.entry.checkpoint for index, row in enumerate(rows) if row.entry is not None}
    if not opened:
        return "parameters", {}
    unit, losses = removed(list(opened.values()), rows[0].parameters)
    if unit == "parameters" and rows[0].parameters is None:  # they are counted against the first
        return unit, {}
    lost = dict(zip(opened, losses, strict=True))
    for index, row in enumerate(rows):
        reduced = [i for i, model in opened.items() if row.fingerprint and _origin(model) == row.fingerprint]
        if index not in opened and reduced:
            lines = dict.fromkeys(line for i in reduced for line in lost[i].lines)
            lost[index] = Removed(0.0, tuple(lines), is_original=True)
    return unit, lost


def _origin(checkpoint: Checkpoint) -> str | None:
    """The fingerprint of what its history began with."""
    history = checkpoint.structure.history
    source = history[0].get("source") if history else None
    return None if source is None else str(source.get("fingerprint"))


def _charts(score: str, rows: Sequence[Row], unit: Unit, lost: dict[int, Removed]) -> list[Html]:
    name = SCORES[score]
    y_name = f"{name} (lower is better)" if score in LOWER_IS_BETTER else name
    scored = {index: row for index, row in enumerate(rows) if score in row.scores}
    by_share = {index: 100 * lost[index].fraction for index in scored if index in lost}
    by_size = {i: row.parameters / 1e6 for i, row in scored.items() if row.parameters is not None}
    by_speed = {
        i: row.timed.timings[0].tokens_per_second.median for i, row in scored.items() if row.timed is not None
    }
    axes = [
        (f"{name} against the {unit} removed", by_share, f"% of {unit} removed"),
        (f"{name} against parameters", by_size, "million parameters"),
        (f"{name} against speed", by_speed, "tokens per second"),
    ]
    return [
        chart(
            caption, _series(rows, values, lost, score, joined=values is by_share), x_name, y_name, zero="x"
        )
        for caption, values, x_name in axes[unit == "parameters" :]
        if len(values) > 1
    ]


def _series(
    rows: Sequence[Row], values: dict[int, float], lost: dict[int, Removed], score: str, joined: bool
) -> list[Series]:
    """A series for each way in which checkpoints were reduced, of the rows that have `values` for the x axis.

    Where `joined`, an original starts the lines of what was made of it.
    """
    points = {i: Point(x, rows[i].scores[score], rows[i].result.checkpoint) for i, x in values.items()}
    originals = [index for index in points if index in lost and lost[index].is_original]
    members: dict[str, list[int]] = {}
    for line in dict.fromkeys(line for loss in lost.values() if not loss.is_original for line in loss.lines):
        own = [index for index in points if index in lost and line in lost[index].lines]
        own = [index for index in own if joined or index not in originals]
        members[line or "reduced"] = sorted(own, key=lambda index: (values[index], index))
    series = [Series(name, tuple(points[i] for i in own), joined) for name, own in members.items()]
    in_lines = {index for own in members.values() for index in own}
    others = {
        "not reduced": [index for index in originals if index not in in_lines],
        "not in this directory": [index for index in points if index not in lost],
    }
    return series + [Series(name, tuple(points[i] for i in own)) for name, own in others.items() if own]


def _table(
    evaluation: Evaluation, rows: Sequence[Row], scores: Sequence[str], unit: Unit, lost: dict[int, Removed]
) -> Html:
    caption = "Quality, size and speed" + ("; scores are means over the pairs" if evaluation.pairs else "")
    fractions = {id(rows[index]): loss.fraction for index, loss in lost.items()}
    cells = {SCORES[score]: lambda row, score=score: _cell(score, row.scores) for score in scores}
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
            "tokens/s": lambda row: row.timed and row.timed.timings[0].tokens_per_second.text(1),
            "speed-up": lambda row: row.timed and row.timed.timings[0].speedup.text(2),
        },
    )


def _by_pair(evaluation: Evaluation, rows: Sequence[Row], score: str) -> Html:
    columns = {
        row.result.checkpoint: lambda pair, row=row: _cell(score, numbers(row.result.pairs.get(pair, {})))
        for row in rows
    }
    return table(f"{SCORES[score]} by pair", evaluation.pairs, {"pair": lambda pair: pair} | columns)


def _by_text(rows: Sequence[Row], scores: Sequence[str]) -> Html:
    """Scores on the texts of one name, a row for each checkpoint."""
    members = [
        (name, row, numbers(row.result.by_text[name]))
        for name in dict.fromkeys(name for row in rows for name in row.result.by_text)
        for row in rows
        if name in row.result.by_text
    ]
    shown = [score for score in scores if any(score in own for _, _, own in members)]
    cells = {SCORES[score]: lambda member, score=score: _cell(score, member[2]) for score in shown}
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
    name = SCORES["kl_divergence"]
    return [
        chart(f"{name} by position", series, "tokens before, log₂", f"{name} (lower is better)", named=False)
    ]


def _cell(score: str, scores: Mapping[str, float]) -> str | None:
    """The score as it is shown; None where it is not among `scores`."""
    if score not in scores:
        return None
    form = {
        "over_generated": ".1%",
        **dict.fromkeys(("chrf++", "chrf", "bleu", "spbleu", "comet"), ",.1f"),
        "length_ratio": ",.2f",
    }
    return format(scores[score], form.get(score, ",.4g"))


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
