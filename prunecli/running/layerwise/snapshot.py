"""The states of a group of batches in a file, so that an interrupted run goes on from its last finished layer.

The file holds the length of a JSON header (8 bytes, little-endian), the header, and the tensors one after another.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from prunecli.modules.trees import leaves, outline, rebuilt
from prunecli.processes import ALONE, ProcessGroup
from prunecli.progress import Say, unsaid
from prunecli.running.layerwise.states import StateStore, Stored
from prunecli.tensors.json_files import lenient, parsed

CHUNK_BYTES = 16 << 20
LEAVES = (Stored, torch.Tensor)


def write_snapshot(path: Path, header: Mapping[str, Any], tree: Any, states: StateStore) -> None:
    """Replace `path` at once by `header` (JSON) and the tensors of `tree`.

    Args:
        tree: of `Stored`, all of them in `states`, and of tensors on the CPU.

    Raises:
        OSError: the file cannot be written, or would leave less space than it takes; `path` is as it was.
    """
    held = leaves(tree, LEAVES)
    text = json.dumps(
        {
            "header": dict(header),
            "tree": outline(tree, LEAVES),
            "tensors": [
                [list(one.shape), str(one.dtype).removeprefix("torch."), isinstance(one, Stored)]
                for one in held
            ],
        }
    ).encode()
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        if shutil.disk_usage(path.parent).free < 2 * (len(text) + sum(one.nbytes for one in held)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with beside.open("wb", buffering=0) as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for one in held:
                for start, end in _row_chunks(one):
                    rows = states.rows(one, start, end) if isinstance(one, Stored) else one[start:end]
                    file.write(rows.reshape(-1).view(torch.uint8).numpy().data)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def read_header(path: Path) -> dict[str, Any] | None:
    """The header that was given to `write_snapshot`; None where there is no whole file."""
    found = _read(path)
    return None if found is None else dict(found[0]["header"])


def read_snapshot(path: Path, states: StateStore) -> Any:
    """The tree that was given to `write_snapshot`, every `Stored` now in `states`.

    Raises:
        OutputError: no room for them.
    """
    found = _read(path)
    if found is None:
        raise FileNotFoundError(path)
    content, offset = found
    made = []
    with path.open("rb") as file:
        file.seek(offset)
        for shape, dtype, is_held in content["tensors"]:
            kind = getattr(torch, dtype)
            place = states.empty(tuple(shape), kind) if is_held else torch.empty(shape, dtype=kind)
            for start, end in _row_chunks(place):
                rows = torch.empty((end - start, *shape[1:]), dtype=kind)
                if file.readinto(rows.view(-1).view(torch.uint8).numpy().data) < rows.nbytes:
                    raise EOFError
                if isinstance(place, Stored):
                    states.write(place, start, rows)
                else:
                    place[start:end] = rows
            made.append(place)
    return rebuilt(content["tree"], iter(made))


@lenient
def _read(path: Path) -> tuple[dict[str, Any], int] | None:
    """The JSON and where the tensors begin."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > path.stat().st_size:
            return None
        content = parsed(file.read(length))
    sizes = [
        torch.Size(shape).numel() * getattr(torch, dtype).itemsize for shape, dtype, _ in content["tensors"]
    ]
    if not isinstance(content["header"], dict) or path.stat().st_size != 8 + length + sum(sizes):
        return None
    return content, 8 + length


def _row_chunks(held: Stored | torch.Tensor) -> list[tuple[int, int]]:
    """First and end rows of parts of at most `CHUNK_BYTES`, or of one row."""
    rows = held.shape[0] if held.nbytes else 0
    step = max(1, CHUNK_BYTES * rows // max(1, held.nbytes))
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]


SNAPSHOT_EVERY_S = 60.0


@dataclass
class Snapshots:
    """The states of a group after its last finished layer, in a file; each of several processes has a file of its own.

    Attributes:
        path: of this process's file.
        key: of the run: a file with another one is not gone on from.
        every_s: seconds between two.
        process_group: the processes go on from the same layer, or none does.
        say: hears once that a file cannot be written, and why.
    """

    path: Path
    key: Mapping[str, Any]
    every_s: float = SNAPSHOT_EVERY_S
    process_group: ProcessGroup = ALONE
    say: Say = unsaid
    written: float = field(default_factory=time.monotonic)

    def group_size(self, batches: int) -> int | None:
        """How many batches the group has that was begun after so many `batches`; None: there is none."""
        found = self.header(batches)
        return None if found is None else int(found["group"])

    def header(self, batches: int) -> dict[str, Any] | None:
        """What all processes know of the group that was begun after so many `batches`."""
        mine = {
            path: read_header(path) if belongs(path, self.key, batches) else None
            for path in (self._next, self.path)
        }
        known = self.process_group.all_gather(list(mine.values()))
        for header in known[0]:
            if header is not None and all(header in one for one in known):
                self._found = next(path for path, own in mine.items() if own == header)
                return header
        return None

    def read(self, states: StateStore) -> dict[str, Any]:
        """The trees of the file that `header` found, their tensors now in `states`."""
        found: dict[str, Any] = read_snapshot(self._found, states)
        return found

    def due(self) -> bool:
        """Whether the last one is old enough, by the clock of the first process."""
        return self.process_group.broadcast(time.monotonic() - self.written >= self.every_s)

    def write(self, header: Mapping[str, Any], tree: Mapping[str, Any], states: StateStore) -> None:
        """Replace the files of all processes, once all have written theirs."""
        fault = None
        try:
            write_snapshot(self._next, {"key": dict(self.key), **header}, dict(tree), states)
        except OSError as error:  # the run itself is sound
            fault = f"{self.path}: not written: {error.strerror or error}"
        faults = [other for other in self.process_group.all_gather(fault) if other is not None]
        if not faults:
            self._next.replace(self.path)
        else:
            self._next.unlink(missing_ok=True)
            self.say(
                f"{faults[0]}. If this run is interrupted, these batches begin again at the first layer."
            )
            self.say = unsaid
        self.written = time.monotonic()

    def __post_init__(self) -> None:
        self._found = self.path

    @property
    def _next(self) -> Path:
        """Where a file waits for those of the other processes."""
        return self.path.with_name(f"{self.path.name}.next")


def belongs(path: Path, key: Mapping[str, Any], batches: int) -> bool:
    """Whether the file is of a run with this key, and of the group that was begun after so many `batches`."""
    found = read_header(path)
    return found is not None and (found.get("key"), found.get("batches")) == (
        json.loads(json.dumps(key)),
        batches,
    )
