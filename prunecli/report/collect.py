"""What a report is made of: the results and checkpoints of a directory, and what of them cannot be read.

And what it states of each model: how it compares with the first of its evaluation, or with its original.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any, TypeVar

from prunecli.errors import CheckpointError, DataError, PruneError
from prunecli.model.checkpoint import Checkpoint, open_model
from prunecli.model.decision import Decision
from prunecli.model.inventory import Inventory, take_inventory
from prunecli.model.opening import SHIM_FILE
from prunecli.model.structure import KEY
from prunecli.progress import Progress, silent
from prunecli.results import kind_of
from prunecli.results.decisions import FILE, Decisions, read_decisions
from prunecli.results.document import Document, numbers
from prunecli.results.evaluation import LOWER_IS_BETTER, Evaluated, Evaluation
from prunecli.results.inspection import Inspection
from prunecli.results.latency import Latency, Timed
from prunecli.results.rewriting import Rewriting, Shrunk, Training
from prunecli.tensors.directory import read_config
from prunecli.tensors.json_files import read_json

DEPTH = 4
"""Folders below the directory that are looked into."""
_STEPPED_OVER = ("__pycache__", "node_modules", "site-packages", "venv")
MOST_IN_LAYER = 65_536
"""Experts or heads of a layer."""
_MARK = b'"prunecli.'
"""Stands near the beginning of every file that prunecli writes, as its format."""
_HEAD_BYTES = 4096
_OWN_NAMES = re.compile(
    r"(gates|heads|evaluation|latency|languages|similarity)\.json|.+\.(finetune|shrink)\.json", re.DOTALL
)
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")


@dataclass(frozen=True)
class CheckpointEntry:
    """A checkpoint.

    Attributes:
        name: its path below the directory, "." for the directory itself.
        checkpoint: closed.
        inventory: what it holds.
        fingerprint: of its tensors.
        decisions: number of a step of its history -> by what it chose.
    """

    name: str
    checkpoint: Checkpoint
    inventory: Inventory
    fingerprint: str
    decisions: dict[int, Decision] = field(default_factory=dict)

    @property
    def history(self) -> tuple[Mapping[str, Any], ...]:
        """Steps of the history, oldest first."""
        return self.checkpoint.structure.history


T = TypeVar("T")


@dataclass(frozen=True)
class ReportData:
    """Tables of the report, by name.

    Attributes:
        title: the directory's name.
        checkpoints: those of the directory.
        elsewhere: checkpoints that lie elsewhere, and that results or histories speak of.
        documents: path below the directory -> the result in this file.
        unreadable: name of a damaged file or checkpoint -> how it is damaged.
    """

    title: str
    checkpoints: list[CheckpointEntry] = field(default_factory=list)
    elsewhere: list[CheckpointEntry] = field(default_factory=list)
    documents: dict[str, Document] = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)

    def of(self, kind: type[T]) -> list[tuple[str, T]]:
        """(file's name, content) of the results of this kind."""
        return [(name, result) for name, result in self.documents.items() if isinstance(result, kind)]

    def known(self, label: str, fingerprint: str) -> CheckpointEntry | None:
        """The checkpoint that a result calls `label`; of several with one fingerprint the one of that name."""
        entries = (*self.checkpoints, *self.elsewhere)
        same = [entry for entry in entries if fingerprint and entry.fingerprint == fingerprint]
        own = label.rpartition("/")[2]
        return min(same, key=lambda entry: entry.name.rpartition("/")[2] != own, default=None)


def collect(
    directory: Path, elsewhere: Mapping[str, Path] | None = None, progress: Progress = silent
) -> ReportData:
    """Read what a report of `directory` shows.

    Hidden folders, virtual environments, `*.training` and links to folders are stepped over.

    Args:
        directory: looked into `DEPTH` levels deep.
        elsewhere: name -> checkpoint outside of it, taken in where a result or a history speaks of it.
        progress: of the reading.

    Raises:
        DataError: no such directory, or it holds nothing that prunecli wrote.
    """
    if not directory.is_dir():
        what = "a file, not a directory" if directory.exists() else "no such directory"
        raise DataError(f"{directory}: {what}", "Name the directory that holds the results.")
    data = ReportData(directory.resolve().name or str(directory.resolve()))
    folders = []
    for name, inside, _ in os.walk(directory):
        depth = len(Path(name).relative_to(directory).parts)
        inside[:] = sorted(
            one
            for one in inside
            if depth < DEPTH
            and not (one.startswith(".") or one.endswith(".training") or one in _STEPPED_OVER)
        )
        folders.append(Path(name))
    with progress("reading", len(folders), "folders") as advance:
        for folder in folders:
            place = folder.relative_to(directory)
            if (folder / "config.json").is_file():
                with _noted(data, place, folder):
                    if _is_checkpoint(folder):
                        entry = _entry(place.as_posix(), folder)
                        data.checkpoints.append(entry)
                        with _noted(data, place / FILE, folder / FILE):
                            entry.decisions.update(read_decisions(folder, entry.history))
            for path in sorted(folder.glob("*.json")):
                if path.is_file() and not path.name.startswith("."):
                    with _noted(data, place / path.name, path):
                        if (result := _read_result(path)) is not None:
                            data.documents[(place / path.name).as_posix()] = result
            advance(1)
    if not (data.checkpoints or data.documents or data.unreadable):
        raise DataError(
            f"{directory}: nothing to report: no results and no checkpoints {DEPTH} folders deep",
            "Name a directory in which prunecli worked, or make results first: prunecli evaluate -o evaluation.json.",
        )
    named = {model.fingerprint for result in data.documents.values() for model in result.models}
    named = named.union(*(entry.checkpoint.structure.fingerprints() for entry in data.checkpoints))
    missing = named - {entry.fingerprint for entry in data.checkpoints}
    for name, original in (elsewhere or {}).items():
        if open_model(original).fingerprint in missing:  # to read a found family takes seconds
            data.elsewhere.append(_entry(name, original))
    return data


@contextmanager
def _noted(data: ReportData, name: PurePath, path: Path) -> Iterator[None]:
    """Add what cannot be read to the data; the reason has no path, so that a page is the same wherever it is made."""
    try:
        yield
    except PruneError as error:
        reason = error.message.removeprefix(f"{path}: ").replace(f"{path}/", "")
        data.unreadable[name.as_posix()] = reason
    except OSError as error:
        data.unreadable[name.as_posix()] = error.strerror or "cannot be read"


def _read_result(path: Path) -> Document | None:
    """Read the result in a file; None for a file of others, or one that no report shows.

    Raises:
        PruneError: a damaged file of prunecli.
    """
    with path.open("rb") as file:
        if _MARK not in file.read(_HEAD_BYTES) and not _OWN_NAMES.fullmatch(path.name):
            return None
    payload = read_json(path)
    kind = kind_of(str(payload.get("format"))) if isinstance(payload, dict) else None
    # Of what most rewriting commands print, the checkpoints themselves are shown.
    if kind is None or (
        issubclass(kind, (Decisions, Inspection, Rewriting)) and kind not in (Shrunk, Training)
    ):
        return None
    return kind.from_json(payload, path)


def _is_checkpoint(folder: Path) -> bool:
    """Whether prunecli wrote it, or it has weights whose headers can be read at once."""
    try:
        config = read_config(folder)
    except PruneError:
        if (folder / SHIM_FILE).is_file():
            raise
        return False  # a config.json of anything else
    return KEY in config or ("model_type" in config and any((folder / name).is_file() for name in _WEIGHTS))


def _entry(name: str, path: Path) -> CheckpointEntry:
    """Read a checkpoint.

    Raises:
        CheckpointError: a damaged checkpoint, or one with more experts or heads in a layer than any model has: their
            cells would fill the memory.
    """
    with open_model(path) as checkpoint:
        inventory = take_inventory(checkpoint)
        counts = [
            *(layer.original_experts for layer in inventory.layers),
            *(layer.original_heads for layer in inventory.attentions),
        ]
        if max(counts, default=0) > MOST_IN_LAYER:
            raise CheckpointError(
                f"{path}: {max(counts):,} experts or heads in a layer; at most {MOST_IN_LAYER:,} are shown"
            )
        return CheckpointEntry(name, checkpoint, inventory, checkpoint.fingerprint)


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
        for result, own in _with_fingerprints(evaluation, evaluation.results)
    ]


def _with_fingerprints(document: Document, results: Sequence[T]) -> Iterator[tuple[T, str]]:
    """Each result and the fingerprint of its checkpoint; "" if the header does not state one for each result."""
    stated = [model.fingerprint or "" for model in document.models]
    return zip(results, stated if len(stated) == len(results) else [""] * len(results), strict=True)


def _timed(data: ReportData, label: str, fingerprint: str) -> Timed | None:
    """The first speed of this checkpoint; among several with its fingerprint the one with its name."""
    for _, latency in data.of(Latency):
        both = _with_fingerprints(latency, latency.results)
        same = [result for result, own in both if fingerprint and own == fingerprint]
        if same:
            return min(same, key=lambda result: result.checkpoint != label)
    return None


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
        words = None
        if self.smaller is not None:
            words = f"{100 * abs(self.smaller):.0f} % {'smaller' if self.smaller >= 0 else 'larger'}"
        return ", ".join(filter(None, (words, self.difference, self.speedup)))


def findings(data: ReportData) -> list[tuple[str, list[Finding]]]:
    """(what they are compared with, a finding for each model): for each evaluation, else for the checkpoints."""
    found = [
        (f"against {evaluation.results[0].checkpoint}, {name}", [*_of_evaluation(evaluation, data)])
        for name, evaluation in data.of(Evaluation)
        if len(evaluation.results) > 1
    ]
    own = [
        Finding(
            entry.name,
            1 - entry.inventory.total.parameters / size[0],
            speedup=_speedup(_timed(data, entry.name, entry.fingerprint)),
        )
        for entry in data.checkpoints
        if (size := entry.checkpoint.structure.original_size) is not None
    ]
    return found or [("against the originals", own)]


def best(found: Sequence[Finding]) -> list[Finding]:
    """At most `MOST_FINDINGS` that no other one surpasses in both size and quality, the largest first."""
    ranked = [((one.smaller or 0.0, one.better or 0.0), one) for one in found if one.text and not one.bad]
    front = [
        one
        for own, one in ranked
        if not any(other != own and other[0] >= own[0] and other[1] >= own[1] for other, _ in ranked)
    ]
    return sorted(front, key=lambda one: one.smaller or 0.0)[-MOST_FINDINGS:]


def _of_evaluation(evaluation: Evaluation, data: ReportData) -> Iterator[Finding]:
    first, *others = rows_of(evaluation, data)
    shown = {name: one for name, one in evaluation.shown_scores.items() if not one.form.endswith("d")}
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
        yield Finding(label, smaller, difference, better, _speedup(row.timed), bad)


def _speedup(timed: Timed | None) -> str | None:
    if timed is None:
        return None
    first = timed.timings[0]
    words = (f"{first.speedup.median:.2f}x", first.phase or "", "(noisy)" if first.is_noisy else "")
    return " ".join(filter(None, words))
