"""What a report is made of: the results and checkpoints of a directory, and what of them cannot be read."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
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
from prunecli.results.document import Document
from prunecli.results.inspection import Inspection
from prunecli.results.rewriting import Rewriting
from prunecli.results.shrinking import Shrunk
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
        named = [entry for entry in same if entry.name.rpartition("/")[2] == label.rpartition("/")[2]]
        return next(iter(named or same), None)


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
    folders = list(_folders(directory))
    with progress("reading", len(folders), "folders") as advance:
        for folder in folders:
            _read_folder(folder, directory, data)
            advance(1)
    if not (data.checkpoints or data.documents or data.unreadable):
        raise DataError(
            f"{directory}: nothing to report: no results and no checkpoints {DEPTH} folders deep",
            "Name a directory in which prunecli worked, or make results first: prunecli evaluate -o evaluation.json.",
        )
    sources = [step.get("source", {}) for entry in data.checkpoints for step in entry.history]
    named = {source.get("fingerprint") for source in sources}
    named |= {model.fingerprint for result in data.documents.values() for model in result.models}
    missing = named - {entry.fingerprint for entry in data.checkpoints}
    entries = (_entry(name, path) for name, path in (elsewhere or {}).items())
    data.elsewhere.extend(entry for entry in entries if entry.fingerprint in missing)
    return data


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


def _read_folder(folder: Path, directory: Path, data: ReportData) -> None:
    """Add the checkpoint and the results in one folder to the data."""
    name = folder.relative_to(directory)
    if (folder / "config.json").is_file():
        with _noted(data, name, folder):
            if _is_checkpoint(folder):
                entry = _entry(name.as_posix(), folder)
                data.checkpoints.append(entry)
                with _noted(data, name / FILE, folder / FILE):
                    entry.decisions.update(read_decisions(folder, entry.history))
    for path in sorted(folder.glob("*.json")):
        if path.is_file() and not path.name.startswith("."):
            with _noted(data, name / path.name, path):
                if (result := _read_result(path)) is not None:
                    data.documents[(name / path.name).as_posix()] = result


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
    if kind is None or (issubclass(kind, (Decisions, Inspection, Rewriting)) and kind is not Shrunk):
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
