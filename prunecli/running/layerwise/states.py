"""Tensors of all batches between two layers: in memory while there is room, then in a file."""

from __future__ import annotations

import errno
import os
import tempfile
from bisect import bisect
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from prunecli.errors import OutputError
from prunecli.modules.machine import spill_directory
from prunecli.tensors.copying import write_from
from prunecli.tensors.reader import read_into

ALIGNMENT = 64


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


class StateStore:
    """Holds tensors, on the CPU; a context manager that gives memory and file back.

    One block of memory is taken at the beginning, of which pages that were never used cost nothing. Tensors that do
    not fit go to a file without a name in `directory`, made when it is first needed.

    Args:
        memory: bytes to hold in memory.
        directory: of the file; None: the system's folder for temporary files.

    Attributes:
        spilled_bytes: size of the file.
    """

    def __init__(self, memory: int, directory: Path | None = None) -> None:
        try:
            self._memory = torch.empty(memory, dtype=torch.uint8)
        except RuntimeError as error:  # which is how torch says so
            raise OutputError(
                f"{memory:,} bytes of memory for the batches' states cannot be had", "Give less --memory."
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
            self._grow(offset + tensor.nbytes)
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
        offset = held.offset + start * held.row_bytes
        if held.in_memory:
            place = self._bytes(True, offset, rows.numel() * held.dtype.itemsize)
            place.view(held.dtype).view(rows.shape).copy_(rows.detach())
            return
        assert self._file is not None
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

    def __enter__(self) -> StateStore:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _grow(self, nbytes: int) -> None:
        """Have the file hold this number of bytes."""
        if nbytes <= self.spilled_bytes:
            return
        try:
            if self._file is None:
                with tempfile.TemporaryFile(dir=self._directory, prefix="prunecli-") as file:
                    self._file = os.dup(file.fileno())
            # Allocated now, so that a full disk fails here and not in the middle of a layer.
            os.posix_fallocate(self._file, self.spilled_bytes, nbytes - self.spilled_bytes)
        except OSError as error:
            raise self._failure(error) from error
        self.spilled_bytes = nbytes

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
                "Name a --spill-dir with more room, give more --memory, or run fewer pairs at a time.",
            )
        return OutputError(
            f"{self._directory}: cannot hold the batches' states ({error.strerror})",
            "Name a --spill-dir that can be written to.",
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
