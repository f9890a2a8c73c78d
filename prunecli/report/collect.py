"""What a report is made of: the results and checkpoints of a directory, and what of them cannot be read."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from prunecli.errors import DataError, PruneError
from prunecli.model.checkpoint import Checkpoint, open_model
from prunecli.model.decision import Decision
from prunecli.model.inventory import Inventory, take_inventory
from prunecli.model.opening import SHIM_FILE
from prunecli.model.structure import KEY
from prunecli.progress import Progress, silent
from prunecli.results import kind_of
from prunecli.results.decisions import FILE, Decisions, read_decisions
from prunecli.results.document import Document
from prunecli.results.evaluation import Evaluation
from prunecli.results.inspection import Inspection
from prunecli.results.latency import Latency
from prunecli.results.rewriting import Rewriting, Training
from prunecli.results.shrinking import Shrunk
from prunecli.results.unit_scores import Scores
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
    decisions: Mapping[int, Decision] = field(default_factory=dict)

    @property
    def history(self) -> tuple[Mapping[str, Any], ...]:
        """Steps of the history, oldest first."""
        return self.checkpoint.structure.history


@dataclass(frozen=True)
class ResultFile:
    """A result file: its path below the directory, and what it holds."""

    name: str
    content: Document


@dataclass(frozen=True)
class Unreadable:
    """A file or checkpoint that is damaged, and how."""

    name: str
    reason: str


T = TypeVar("T")


@dataclass(frozen=True)
class ReportData:
    """Tables of the report, by name.

    Attributes:
        title: the directory's name.
        checkpoints: those of the directory.
        elsewhere: checkpoints that lie elsewhere, and that results or histories speak of.
        documents: the result files.
        unreadable: what is damaged.
    """

    title: str
    checkpoints: tuple[CheckpointEntry, ...]
    elsewhere: tuple[CheckpointEntry, ...]
    documents: tuple[ResultFile, ...]
    unreadable: tuple[Unreadable, ...]

    def of(self, kind: type[T]) -> list[tuple[str, T]]:
        """(file's name, content) of the results of this kind."""
        return [(file.name, file.content) for file in self.documents if isinstance(file.content, kind)]

    def known(self, label: str, fingerprint: str) -> CheckpointEntry | None:
        """The checkpoint that a result calls `label`; of several with one fingerprint the one of that name."""
        entries = (*self.checkpoints, *self.elsewhere)
        same = [entry for entry in entries if fingerprint and entry.fingerprint == fingerprint]
        named = [entry for entry in same if entry.name.rpartition("/")[2] == label.rpartition("/")[2]]
        return next(iter(named or same), None)


def require_directory(directory: Path) -> None:
    """Refuse what is no directory.

    Raises:
        DataError: a file, or nothing of this name.
    """
    if not directory.is_dir():
        what = "a file, not a directory" if directory.exists() else "no such directory"
        raise DataError(f"{directory}: {what}", "Name the directory that holds the results.")


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
    require_directory(directory)
    checkpoints, documents, unreadable = [], [], []
    folders = list(_folders(directory))
    with progress("reading", len(folders), "folders") as advance:
        for folder in folders:
            for item in _in_folder(folder, directory):
                if isinstance(item, CheckpointEntry):
                    checkpoints.append(item)
                elif isinstance(item, ResultFile):
                    documents.append(item)
                else:
                    unreadable.append(item)
            advance(1)
    if not (checkpoints or documents or unreadable):
        raise DataError(
            f"{directory}: nothing to report: no results and no checkpoints {DEPTH} folders deep",
            "Name a directory in which prunecli worked, or make results first: prunecli evaluate -o evaluation.json.",
        )
    return ReportData(
        title=directory.resolve().name or str(directory.resolve()),
        checkpoints=tuple(checkpoints),
        elsewhere=tuple(_referenced(elsewhere or {}, checkpoints, documents)),
        documents=tuple(documents),
        unreadable=tuple(unreadable),
    )


def _folders(directory: Path) -> Iterator[Path]:
    """The directory and its folders, by name."""
    for folder, names, _ in os.walk(directory):
        depth = len(Path(folder).relative_to(directory).parts)
        names[:] = sorted(
            name
            for name in names
            if depth < DEPTH
            and not (name.startswith(".") or name.endswith(".training") or name in _STEPPED_OVER)
        )
        yield Path(folder)


def _in_folder(folder: Path, directory: Path) -> Iterator[CheckpointEntry | ResultFile | Unreadable]:
    """Yield the documents in one folder, the folder itself as a checkpoint first."""
    name = folder.relative_to(directory).as_posix()
    if (folder / "config.json").is_file():
        try:
            if _is_checkpoint(folder):
                entry = _entry(name, folder)
                try:
                    yield replace(entry, decisions=_decisions(folder, entry))
                except PruneError as error:
                    yield entry
                    yield Unreadable((Path(name) / FILE).as_posix(), _reason(error, folder / FILE))
        except (PruneError, OSError) as error:
            yield Unreadable(name, _reason(error, folder))
    for path in sorted(folder.glob("*.json")):
        if not path.is_file() or path.name.startswith("."):
            continue
        where = path.relative_to(directory).as_posix()
        try:
            document = read_document(where, path)
        except (PruneError, OSError) as error:
            yield Unreadable(where, _reason(error, path))
        else:
            if document is not None:
                yield document


def read_document(name: str, path: Path) -> ResultFile | None:
    """The result in a file; None for a file of others, or one that no report shows.

    Raises:
        PruneError: one of prunecli's that is damaged.
    """
    if _MARK not in _head(path):
        if _OWN_NAMES.fullmatch(path.name):
            read_json(path)  # an empty or cut file of this name is most likely one of prunecli's
        return None
    payload = read_json(path)
    format_ = payload.get("format") if isinstance(payload, dict) else None
    if not isinstance(format_, str):
        return None
    kind = kind_of(format_)
    # Of what most rewriting commands print, the checkpoints themselves are shown.
    if kind is None or (issubclass(kind, (Decisions, Inspection, Rewriting)) and kind is not Shrunk):
        return None
    content = kind.from_json(payload, path)
    if isinstance(content, Scores) and content.kind == "head":
        refuse_many(path, 1 + max(head for heads in content.ids.values() for head in heads))
    return ResultFile(name, content)


def refuse_many(path: Path, count: int) -> None:
    """Refuse a layer of so many experts or heads as no model has: their cells would fill the memory.

    Raises:
        DataError: more than `MOST_IN_LAYER`.
    """
    if count > MOST_IN_LAYER:
        raise DataError(
            f"{path}: {min(count, 10**18):,} experts or heads in a layer; at most {MOST_IN_LAYER:,} are shown"
        )


def _head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_HEAD_BYTES)
    except FileNotFoundError:
        return b""


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
    with open_model(path) as checkpoint:
        inventory = take_inventory(checkpoint)
        counts = [
            *(layer.original_experts for layer in inventory.layers),
            *(layer.original_heads for layer in inventory.attentions),
        ]
        refuse_many(path, max(counts, default=0))
        return CheckpointEntry(name, checkpoint, inventory, checkpoint.fingerprint)


def _decisions(folder: Path, entry: CheckpointEntry) -> dict[int, Decision]:
    found = read_decisions(folder, entry.history)
    for decision in found.values():
        if decision.part in ("expert", "head", "layer"):
            refuse_many(
                folder / FILE,
                1 + max((int(place.ids.max(initial=0)) for place in decision.places), default=0),
            )
    return found


def _reason(error: PruneError | OSError, path: Path) -> str:
    """Return the message of an error without the path, so that a page is the same wherever its directory lies."""
    if isinstance(error, OSError):
        return error.strerror or "cannot be read"
    return error.message.removeprefix(f"{path}: ").replace(f"{path}/", "")


def _referenced(
    elsewhere: Mapping[str, Path], checkpoints: Sequence[CheckpointEntry], documents: Sequence[ResultFile]
) -> Iterator[CheckpointEntry]:
    """Return the checkpoints of `elsewhere` that a history or a result names and the directory lacks."""
    missing = set(_spoken_of(checkpoints, documents)) - {entry.fingerprint for entry in checkpoints}
    if missing:
        entries = (_entry(name, path) for name, path in elsewhere.items())
        yield from (entry for entry in entries if entry.fingerprint in missing)


def _spoken_of(checkpoints: Sequence[CheckpointEntry], documents: Sequence[ResultFile]) -> Iterable[str]:
    for entry in checkpoints:
        for step in entry.history:
            if "source" in step:
                yield str(step["source"].get("fingerprint"))
    for document in documents:
        if isinstance(document.content, (Evaluation, Latency, Training)):
            yield from (model.fingerprint or "" for model in document.content.models)
