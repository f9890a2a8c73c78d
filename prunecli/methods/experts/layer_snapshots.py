"""What a run by layers keeps of a group of batches that is part of the way through, to go on from."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prunecli.processes import ALONE, ProcessGroup
from prunecli.running.layerwise.snapshot import read_header, read_snapshot, write_snapshot
from prunecli.running.layerwise.states import StateStore

SNAPSHOT_EVERY_S = 60.0


@dataclass
class Snapshots:
    """The states of a group after its last finished layer, in a file; each of several processes has a file of its own.

    Attributes:
        path: of this process's file.
        key: of the run: a file with another one is not gone on from.
        every_s: seconds between two.
        process_group: the processes go on from the same layer, or none does.
    """

    path: Path
    key: Mapping[str, Any]
    every_s: float = SNAPSHOT_EVERY_S
    process_group: ProcessGroup = ALONE
    written: float = field(default_factory=time.monotonic)

    def group_size(self, batches: int) -> int | None:
        """How many batches the group has that was begun after so many `batches`; None: there is none."""
        found = self.header(batches)
        return None if found is None else int(found["group"])

    def header(self, batches: int) -> dict[str, Any] | None:
        """What all processes know of the group that was begun after so many `batches`."""
        mine = {path: self._header(path, batches) for path in (self._next, self.path)}
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
        whole = write_snapshot(self._next, {"key": dict(self.key), **header}, dict(tree), states)
        if all(self.process_group.all_gather(whole)):
            self._next.replace(self.path)
        elif whole:
            self._next.unlink()
        self.written = time.monotonic()

    def __post_init__(self) -> None:
        self._found = self.path

    @property
    def _next(self) -> Path:
        """Where a file waits for those of the other processes."""
        return self.path.with_name(f"{self.path.name}.next")

    def _header(self, path: Path, batches: int) -> dict[str, Any] | None:
        return read_header(path) if belongs(path, self.key, batches) else None


def belongs(path: Path, key: Mapping[str, Any], batches: int) -> bool:
    """Whether the file is of a run with this key, and of the group that was begun after so many `batches`."""
    found = read_header(path)
    return found is not None and (found.get("key"), found.get("batches")) == (
        json.loads(json.dumps(key)),
        batches,
    )
