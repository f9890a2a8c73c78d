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
from pathlib import Path
from typing import Any, BinaryIO

import torch

from prunecli.modules.trees import leaves, outline, rebuilt
from prunecli.processes import ALONE, ProcessGroup
from prunecli.progress import Say, unsaid
from prunecli.running.layerwise.states import StateStore, Stored
from prunecli.tensors.json_files import lenient, parsed

LEAVES = (Stored, torch.Tensor)


def write_snapshot(path: Path, header: Mapping[str, Any], tree: Any, states: StateStore) -> None:
    """Write `header` (JSON) and the tensors of `tree`.

    Args:
        tree: of `Stored`, all of them in `states`, and of tensors on the CPU.

    Raises:
        OSError: the file cannot be written, or would leave less space than it takes.
    """
    held = leaves(tree, LEAVES)
    tensors = [(one.shape, str(one.dtype).removeprefix("torch."), isinstance(one, Stored)) for one in held]
    content = {"header": dict(header), "tree": outline(tree, LEAVES), "tensors": tensors}
    text = json.dumps(content).encode()
    if shutil.disk_usage(path.parent).free < 2 * (len(text) + sum(one.nbytes for one in held)):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for one in held:
            tensor = states.get(one) if isinstance(one, Stored) else one
            file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)


@lenient
def read_header(path: Path) -> dict[str, Any] | None:
    """The header that was given to `write_snapshot`; None where there is no whole file."""
    with path.open("rb") as file:
        content, tensors = _read(file)
        size = sum(shape.numel() * dtype.itemsize for shape, dtype, _ in tensors)
        is_whole = path.stat().st_size == file.tell() + size
    return dict(content["header"]) if is_whole else None


def read_snapshot(path: Path, states: StateStore) -> Any:
    """The tree that was given to `write_snapshot`, every `Stored` now in `states`.

    Raises:
        OutputError: no room for them.
    """
    made = []
    with path.open("rb") as file:
        content, tensors = _read(file)
        for shape, dtype, is_stored in tensors:
            tensor = torch.empty(shape, dtype=dtype)
            file.readinto(tensor.view(-1).view(torch.uint8).numpy().data)
            made.append(states.put(tensor) if is_stored else tensor)
    return rebuilt(content["tree"], iter(made))


def _read(file: BinaryIO) -> tuple[dict[str, Any], list[tuple[torch.Size, torch.dtype, bool]]]:
    """The JSON, up to which the file is read, and shape and type of each tensor, and whether it was in a store."""
    (length,) = struct.unpack("<Q", file.read(8))
    if length > os.fstat(file.fileno()).st_size:
        raise ValueError(length)
    content = parsed(file.read(length))
    tensors = [
        (torch.Size(shape), getattr(torch, dtype), stored) for shape, dtype, stored in content["tensors"]
    ]
    return content, tensors


SNAPSHOT_EVERY_S = 60.0


class Snapshots:
    """The states of a group after its last finished layer, in a file; each of several processes has a file of its own.

    Args:
        path: of this process's file.
        key: of the run: a file with another one is not resumed.
        every_s: seconds between two.
        process_group: the processes resume after the same layer, or none does.
        say: called once if a file cannot be written, with the reason.
    """

    def __init__(
        self,
        path: Path,
        key: Mapping[str, Any],
        every_s: float = SNAPSHOT_EVERY_S,
        process_group: ProcessGroup = ALONE,
        say: Say = unsaid,
    ) -> None:
        self._path, self._key, self._every_s = path, key, every_s
        self._process_group, self._say = process_group, say
        self._next = path.with_name(
            f"{path.name}.next"
        )  # where a file waits for those of the other processes
        self._written = time.monotonic()

    def group_size(self, batches: int) -> int | None:
        """Number of batches of the group that was begun after so many `batches`; None: there is none."""
        found = self.header(batches)
        return None if found is None else int(found["group"])

    def header(self, batches: int) -> dict[str, Any] | None:
        """Header, the same for all processes, of the group that was begun after so many `batches`."""
        paths = self._next, self._path
        mine = [own_header(path, self._key, batches) for path in paths]
        known = self._process_group.all_gather(mine)
        for header in known[0]:
            if header is not None and all(header in one for one in known):
                if header == mine[0]:  # this process ended before it replaced the file
                    self._next.replace(self._path)
                return header
        return None

    def read(self, states: StateStore) -> dict[str, Any]:
        """The trees of the file that `header` found, their tensors now in `states`."""
        found: dict[str, Any] = read_snapshot(self._path, states)
        return found

    def due(self) -> bool:
        """Whether the last one is old enough, by the clock of the first process."""
        return self._process_group.broadcast(time.monotonic() - self._written >= self._every_s)

    def write(self, header: Mapping[str, Any], tree: Mapping[str, Any], states: StateStore) -> None:
        """Replace the files of all processes, once all have written theirs."""
        fault = None
        try:
            write_snapshot(self._next, {"key": dict(self._key), **header}, dict(tree), states)
        except OSError as error:  # the run itself is sound
            fault = f"{self._path}: not written: {error.strerror or error}"
        faults = [other for other in self._process_group.all_gather(fault) if other is not None]
        if not faults:
            self._next.replace(self._path)
        else:
            self._next.unlink(missing_ok=True)
            self._say(
                f"{faults[0]}. If this run is interrupted, these batches begin again at the first layer."
            )
            self._say = unsaid
        self._written = time.monotonic()


def own_header(path: Path, key: Mapping[str, Any], batches: int) -> dict[str, Any] | None:
    """Header of the file, if it is of a run with this key and of the group that was begun after so many `batches`."""
    found = read_header(path) or {}
    is_own = (found.get("key"), found.get("batches")) == (json.loads(json.dumps(key)), batches)
    return found if is_own else None
