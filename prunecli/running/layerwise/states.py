"""Tensors of all batches between two layers: in memory while there is room, then in a file.

A snapshot is a safetensors file with the tensors of a group of batches, from which an interrupted run resumes after its
last finished layer.
"""

import errno
import json
import os
import shutil
import tempfile
import time
from bisect import bisect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from prunecli.errors import OutputError
from prunecli.modules.filling import tensors_of
from prunecli.modules.machine import spill_directory
from prunecli.modules.saving import save_tensors
from prunecli.private import pytree
from prunecli.processes import ALONE, ProcessGroup
from prunecli.progress import Say, unsaid
from prunecli.tensors.copying import write_from
from prunecli.tensors.directory import read_header as read_file_header
from prunecli.tensors.json_files import lenient, parsed
from prunecli.tensors.reader import Closing, TensorReader, read_into

SNAPSHOT_EVERY_S = 60.0
ALIGNMENT = 64

CONTENT = "content"
"""Name in a snapshot of the bytes of its JSON."""


@dataclass(frozen=True)
class Stored:
    """A tensor in a `StateStore`.

    Attributes:
        shape: of the tensor.
        dtype: of the tensor.
        offset: of its first byte, in the memory or in the file.
        in_memory: in which of the two.
        requires_grad: of the tensor.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    in_memory: bool
    requires_grad: bool = False

    @property
    def row_bytes(self) -> int:
        """Bytes of one entry along the first axis."""
        return torch.Size(self.shape[1:]).numel() * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class StateStore(Closing):
    """Holds tensors.

    One block of memory is taken at the beginning, of which pages of the host that were never used cost nothing. Tensors
    that do not fit go to a file without a name in `directory`, made when it is first needed.

    Args:
        memory: bytes to hold in memory.
        directory: of the file; None: the system's folder for temporary files.
        device: whose memory it is.

    Attributes:
        spilled_bytes: size of the file.
    """

    def __init__(
        self, memory: int, directory: Path | None = None, device: torch.device | str = "cpu"
    ) -> None:
        try:
            self._memory = torch.empty(memory, dtype=torch.uint8, device=device)
        except RuntimeError as error:  # which is how torch says so
            raise OutputError(
                f"{memory:,} bytes of memory for the batches' states cannot be had", "Give less `memory`."
            ) from error
        self._space, self._file_space = _Space(memory), _Space(1 << 62)
        self._directory = spill_directory(directory)
        self._file: int | None = None
        self.spilled_bytes = 0

    @property
    def free_memory(self) -> int:
        """Bytes of the memory that are not in use."""
        return self._space.free

    def put(self, tensor: Tensor) -> Stored:
        """Store a copy of `tensor`.

        Raises:
            OutputError: the file cannot grow: the disk is full, or the directory cannot be written to.
        """
        offset = self._space.take(tensor.nbytes)
        in_memory = offset is not None
        if offset is None:
            offset = self._file_space.take(tensor.nbytes)
            assert offset is not None
            more = offset + tensor.nbytes - self.spilled_bytes
            try:
                if self._file is None:
                    with tempfile.TemporaryFile(dir=self._directory, prefix="prunecli-") as file:
                        self._file = os.dup(file.fileno())
                if more > 0:  # allocated now, so that a full disk fails here and not in the middle of a layer
                    os.posix_fallocate(self._file, self.spilled_bytes, more)
                    self.spilled_bytes += more
            except OSError as error:
                raise self._failure(error) from error
        held = Stored(tuple(tensor.shape), tensor.dtype, offset, in_memory, tensor.requires_grad)
        if held.nbytes:
            self.write(held, 0, tensor.reshape(1) if tensor.dim() == 0 else tensor)
        return held

    def get(self, held: Stored) -> Tensor:
        """A copy of the tensor."""
        found = self._bytes(held.in_memory, held.offset, held.nbytes).view(held.dtype).view(held.shape)
        return found.clone() if held.in_memory else found

    def rows(self, held: Stored, start: int, end: int) -> Tensor:
        """Entries `start` to `end` along the first axis; no copy of those in memory."""
        offset, nbytes = held.offset + start * held.row_bytes, (end - start) * held.row_bytes
        return self._bytes(held.in_memory, offset, nbytes).view(held.dtype).view(end - start, *held.shape[1:])

    def write(self, held: Stored, start: int, rows: Tensor) -> None:
        """Replace the entries from `start` on along the first axis."""
        if held.in_memory:
            self.rows(held, start, start + len(rows)).copy_(rows.detach())
            return
        assert self._file is not None
        offset = held.offset + start * held.row_bytes
        data = rows.detach().to("cpu", held.dtype).contiguous().view(-1).view(torch.uint8).numpy().data
        try:
            write_from(self._file, offset, data)
        except OSError as error:
            raise self._failure(error) from error

    def drop(self, held: Stored) -> None:
        """Free the space of a tensor."""
        (self._space if held.in_memory else self._file_space).give(held.offset, held.nbytes)

    def close(self) -> None:
        """Free memory and file."""
        self._memory = torch.empty(0, dtype=torch.uint8)
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _bytes(self, in_memory: bool, offset: int, nbytes: int) -> Tensor:
        """`[nbytes]` uint8: a view of the memory, or what is read from the file."""
        if in_memory:
            return self._memory[offset : offset + nbytes]
        made = torch.empty(nbytes, dtype=torch.uint8)
        if self._file is not None:
            try:
                read_into(self._file, offset, made.numpy().data)
            except EOFError:
                raise OutputError(
                    f"{self._directory}: the file with the batches' states was cut short"
                ) from None
        return made

    def _failure(self, error: OSError) -> OutputError:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return OutputError(
                f"{self._directory}: no room for the batches' states ({self.spilled_bytes:,} bytes are there)",
                "Name a `spill_directory` with more room, give more `memory`, or run fewer pairs at a time.",
            )
        return OutputError(
            f"{self._directory}: cannot hold the batches' states ({error.strerror})",
            "Name a `spill_directory` that can be written to.",
        )


class _Space:
    """Which bytes of `size` are in use: first fit, neighbouring gaps joined."""

    def __init__(self, size: int) -> None:
        self._gaps = [(0, size)]

    @property
    def free(self) -> int:
        return sum(end - start for start, end in self._gaps)

    def take(self, nbytes: int) -> int | None:
        nbytes = _aligned(nbytes)
        for index, (start, end) in enumerate(self._gaps):
            if end - start >= nbytes:
                self._gaps[index : index + 1] = [(start + nbytes, end)] if end - start > nbytes else []
                return start
        return None

    def give(self, offset: int, nbytes: int) -> None:
        if not nbytes:
            return
        gap = offset, offset + _aligned(nbytes)
        index = bisect(self._gaps, gap)
        if index < len(self._gaps) and self._gaps[index][0] == gap[1]:
            gap = gap[0], self._gaps.pop(index)[1]
        if index and self._gaps[index - 1][1] == gap[0]:
            index -= 1
            gap = self._gaps.pop(index)[0], gap[1]
        self._gaps.insert(index, gap)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


LEAVES = (Stored, Tensor)
Kind = type | tuple[type, ...]


def map_tree(tree: Any, function: Callable[[Any], Any], kind: Kind) -> Any:
    """Return the tree with `function` applied to every `kind` in it."""
    return pytree().tree_map_only(kind, function, tree)


def leaves(tree: Any, kind: Kind) -> list[Any]:
    """Every `kind` in the tree, in order."""
    return [leaf for leaf in pytree().tree_leaves(tree) if isinstance(leaf, kind)]


def outline(tree: Any, kind: Kind) -> Any:
    """Return the structure of a tree as JSON: every leaf that is no `kind` in it, and the place of each `kind`."""
    found, spec = pytree().tree_flatten(tree)
    others = [None if isinstance(leaf, kind) else {"value": leaf} for leaf in found]
    return {"spec": pytree().treespec_dumps(spec), "leaves": others}


def write_snapshot(path: Path, header: Mapping[str, Any], tree: Any, states: StateStore) -> None:
    """Write `header` (JSON) and the tensors of `tree`.

    Args:
        tree: of `Stored`, all of them in `states`, and of tensors on the CPU.

    Raises:
        OSError: the file cannot be written, or would leave less space than it takes.
    """
    held = leaves(tree, LEAVES)
    is_stored = [isinstance(one, Stored) for one in held]
    text = json.dumps({"header": dict(header), "tree": outline(tree, LEAVES), "stored": is_stored})
    content = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    tensors = {CONTENT: content, **{str(number): one for number, one in enumerate(held)}}
    if shutil.disk_usage(path.parent).free < 2 * sum(one.nbytes for one in tensors.values()):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    save_tensors(tensors, path, lambda one: states.get(one) if isinstance(one, Stored) else one)


@lenient
def read_header(path: Path) -> dict[str, Any]:
    """The header that was given to `write_snapshot`; None where there is no whole file."""
    with _opened(path) as file:
        return dict(_content(file)["header"])


def read_snapshot(path: Path, states: StateStore) -> Any:
    """The tree that was given to `write_snapshot`, every `Stored` now in `states`.

    Raises:
        OutputError: no room for them.
    """
    with _opened(path) as file:
        content = _content(file)
        tensors = tensors_of(file, map(str, range(len(content["stored"]))))
        made = (
            states.put(tensor) if is_stored else tensor
            for tensor, is_stored in zip(tensors, content["stored"], strict=True)
        )
        outlined = content["tree"]
        found = [next(made) if other is None else other["value"] for other in outlined["leaves"]]
    return pytree().tree_unflatten(found, pytree().treespec_loads(outlined["spec"]))


def _opened(path: Path) -> TensorReader:
    return TensorReader(path.parent, (read_file_header(path),))


def _content(file: TensorReader) -> Any:
    """The header, the tree without its tensors, and which of them were in a store."""
    return parsed(file.read(CONTENT).tobytes())


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

    def read(self, states: StateStore) -> Any:
        """The trees of the file that `header` found, their tensors now in `states`."""
        return read_snapshot(self._path, states)

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
