"""What a report states of each model: how it compares with the first of its evaluation, or with its original."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prunecli.evaluation.scoring import LEAST, too_few
from prunecli.report.collect import CheckpointEntry, ReportData
from prunecli.results.document import numbers, with_fingerprints
from prunecli.results.evaluation import LOWER_IS_BETTER, Evaluated, Evaluation
from prunecli.results.latency import Latency, Timed

MOST_FINDINGS = 6


@dataclass(frozen=True)
class Row:
    """One evaluated checkpoint and what else is known about it.

    Attributes:
        result: its scores in evaluation.json.
        fingerprint: of the checkpoint; "" if the file does not state one.
        entry: the checkpoint, if it could be opened.
        timed: its speed, if a latency.json has one.
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
    def size(self) -> tuple[int | None, int | None]:
        """Parameters, and bytes of the weights: from the headers, else as the quality or the speed was measured."""
        if self.entry is not None:
            total = self.entry.inventory.total
            return total.parameters, total.bytes
        known = self.timed if self.result.parameters is None else self.result
        return (None, None) if known is None else (known.parameters, known.checkpoint_bytes)


def rows_of(evaluation: Evaluation, data: ReportData) -> list[Row]:
    """A row for each result, with the checkpoint and the speed that have its fingerprint."""
    return [
        Row(result, own, data.known(result.checkpoint, own), _timed(data, result.checkpoint, own))
        for result, own in with_fingerprints(evaluation, evaluation.results)
    ]


def _timed(data: ReportData, label: str, fingerprint: str) -> Timed | None:
    """The first speed of this checkpoint; among several with its fingerprint the one with its name."""
    for _, latency in data.of(Latency):
        both = with_fingerprints(latency, latency.results)
        same = [result for result, own in both if fingerprint and own == fingerprint]
        if same:
            return min(same, key=lambda result: result.checkpoint != label)
    return None


def tested(evaluation: Evaluation) -> tuple[Evaluation, str | None]:
    """The evaluation without its significance test if there is too little text for one, and a line that says so."""
    test = evaluation.significance
    # McNemar's test is exact: with too little text it finds nothing.
    if test is None or str(test.get("test")).startswith("McNemar"):
        return evaluation, None
    data = numbers(evaluation.data) | numbers(test)
    examples = data.get("examples", data.get("sentences", data.get("texts", LEAST)))
    what = "windows" if "windows" in str(test.get("test")) else "sentences" if evaluation.pairs else "texts"
    few = too_few(int(examples), what)
    return (evaluation.model_copy(update={"significance": None}) if few else evaluation), few


@dataclass(frozen=True)
class Finding:
    """How one model compares with the first one of an evaluation, or with its original.

    Attributes:
        name: of the model.
        smaller: share of the parameters that it lacks; None: unknown.
        difference: score, with its sign and its name ("-3.0 chrF++"); None: unknown.
        better: how much better it is by this score, for comparisons.
        speedup: median factor in speed and what is noted about it ("1.30x"); None: unknown.
        bad: line that names what is wrong with its outputs; "" if nothing is.
    """

    name: str
    smaller: float | None
    difference: str | None = None
    better: float | None = None
    speedup: str | None = None
    bad: str = ""

    @property
    def text(self) -> str:
        """`72 % smaller, -3.0 chrF++, 1.30x`."""
        size = None if self.smaller is None else f"{abs(self.smaller):.0%}".replace("%", " %")
        words = None if size is None else f"{size} {'smaller' if (self.smaller or 0) >= 0 else 'larger'}"
        return ", ".join(filter(None, (words, self.difference, self.speedup)))


def findings(data: ReportData) -> list[tuple[str, list[Finding]]]:
    """(what they are compared with, a finding for each model): for each evaluation, else for the checkpoints."""
    found = [
        (f"against {evaluation.results[0].checkpoint}, {name}", _of_evaluation(evaluation, data))
        for name, evaluation in data.of(Evaluation)
        if len(evaluation.results) > 1
    ]
    if found:
        return found
    own = []
    for entry in data.checkpoints:
        size = entry.checkpoint.structure.original_size
        if size is not None:
            timed = _timed(data, entry.name, entry.fingerprint)
            smaller = 1 - entry.inventory.total.parameters / size[0]
            own.append(Finding(entry.name, smaller, speedup=_speedup(timed)))
    return [("against the originals", own)] if own else []


def best(found: Sequence[Finding]) -> list[Finding]:
    """At most `MOST_FINDINGS` that no other one surpasses in both size and quality, the largest first."""
    ranked = [((one.smaller or 0.0, one.better or 0.0), one) for one in found if one.text and not one.bad]
    front = [
        one
        for own, one in ranked
        if not any(other != own and other[0] >= own[0] and other[1] >= own[1] for other, _ in ranked)
    ]
    return sorted(front, key=lambda one: one.smaller or 0.0)[-MOST_FINDINGS:]


def _of_evaluation(evaluation: Evaluation, data: ReportData) -> list[Finding]:
    first, *others = rows_of(evaluation, data)
    shown = {name: one for name, one in evaluation.shown_scores.items() if not one.form.endswith("d")}
    made = []
    for row in others:
        size, whole = row.size[0], first.size[0]
        smaller = 1 - size / whole if size is not None and whole else None
        name = next((n for n in shown if n in row.scores and (n in first.scores or shown[n].of_two)), None)
        difference = better = None
        if name is not None and name in first.scores and not shown[name].of_two:
            difference = f"{shown[name].difference(row.scores[name], first.scores[name])} {shown[name].title}"
            sign = -1 if name in LOWER_IS_BETTER else 1
            better = sign * (row.scores[name] - first.scores[name])
        label = row.result.checkpoint
        bad = next((line for line in evaluation.ruined if line.startswith(f"{label}: ")), "")
        made.append(Finding(label, smaller, difference, better, _speedup(row.timed), bad))
    return made


def _speedup(timed: Timed | None) -> str | None:
    if timed is None:
        return None
    first = timed.timings[0]
    words = (f"{first.speedup.median:.2f}x", first.phase or "", "(noisy)" if first.is_noisy else "")
    return " ".join(filter(None, words))
