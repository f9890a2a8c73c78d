"""Tensors of all batches between two layers: in memory while there is room, then in a file."""

from __future__ import annotations

import errno
import os
import tempfile
from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
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
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    in_memory: bool

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

    One block of memory is taken at the beginning, of which pages that were never used cost nothing. What finds no
    room there goes to a file without a name in `directory`, made when it is first needed.

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
        self._space = _Space(memory)
        self._file_space = _Space(None)
        self._directory = spill_directory(directory)
        self._file: int | None = None
        self.spilled_bytes = 0

    @property
    def free_memory(self) -> int:
        """Bytes of the memory that are not in use."""
        return self._space.free

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Stored:
        """Room for a tensor.

        Raises:
            OutputError: the file cannot grow: the disk is full, or the directory cannot be written to.
        """
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        offset = self._space.take(nbytes)
        if offset is not None:
            return Stored(shape, dtype, offset, True)
        offset = self._file_space.take(nbytes)
        assert offset is not None
        needed = offset + nbytes
        if needed > self.spilled_bytes:
            try:
                if self._file is None:
                    with tempfile.TemporaryFile(dir=self._directory, prefix="prunecli-") as file:
                        self._file = os.dup(file.fileno())
                # Room is taken, not promised: a full disk says so here and not in the middle of a layer.
                os.posix_fallocate(self._file, self.spilled_bytes, needed - self.spilled_bytes)
            except OSError as error:
                raise self._failure(error) from error
            self.spilled_bytes = needed
        return Stored(shape, dtype, offset, False)

    def put(self, tensor: Tensor, place: Stored | None = None) -> Stored:
        """Keep a copy of `tensor`, in `place` where it has the same shape and type; else that is given back."""
        shape = tuple(tensor.shape)
        if place is None or (place.shape, place.dtype) != (shape, tensor.dtype):
            if place is not None:
                self.drop(place)
            place = self.empty(shape, tensor.dtype)
        if place.nbytes:
            self.write(place, 0, tensor.reshape(1) if tensor.dim() == 0 else tensor)
        return place

    def get(self, held: Stored) -> Tensor:
        """A copy of the tensor."""
        if not held.nbytes:
            return torch.empty(held.shape, dtype=held.dtype)
        if held.in_memory:
            return self._view(held.offset, held.nbytes, held.dtype).view(held.shape).clone()
        return self._load(held.offset, held.nbytes, held.dtype).view(held.shape)

    def rows(self, held: Stored, start: int, end: int) -> Tensor:
        """Entries `start` to `end` along the first axis; where they are held in memory, no copy of them."""
        offset, nbytes = held.offset + start * held.row_bytes, (end - start) * held.row_bytes
        found = self._view if held.in_memory else self._load
        return found(offset, nbytes, held.dtype).view(end - start, *held.shape[1:])

    def write(self, held: Stored, start: int, rows: Tensor) -> None:
        """Replace the entries from `start` on along the first axis."""
        offset = held.offset + start * held.row_bytes
        if held.in_memory:
            place = self._view(offset, rows.numel() * held.dtype.itemsize, held.dtype)
            place.view(rows.shape).copy_(rows.detach())
            return
        assert self._file is not None
        data = rows.detach().to("cpu", held.dtype).contiguous().view(-1).view(torch.uint8).numpy().data
        try:
            write_from(self._file, offset, data)
        except OSError as error:
            raise self._failure(error) from error

    def gather(self, held: Stored, numbers: Tensor) -> Tensor:
        """A copy of the entries along the first axis that have these `numbers`, in their order."""
        if held.in_memory:
            return self.rows(held, 0, held.shape[0]).index_select(0, numbers)
        made = torch.empty((len(numbers), *held.shape[1:]), dtype=held.dtype)
        for place, start, count in _stretches(numbers):
            made[place : place + count] = self.rows(held, start, start + count)
        return made

    def add(self, held: Stored, numbers: Tensor, added: Tensor) -> None:
        """Add a row to each of these entries, no two of them the same."""
        if held.in_memory:
            self.rows(held, 0, held.shape[0]).index_add_(0, numbers, added)
            return
        sums = self.gather(held, numbers).add_(added)
        for place, start, count in _stretches(numbers):
            self.write(held, start, sums[place : place + count])

    def drop(self, held: Stored) -> None:
        """Give a tensor's room back."""
        (self._space if held.in_memory else self._file_space).give(held.offset, held.nbytes)

    def close(self) -> None:
        """Give everything back."""
        self._memory = torch.empty(0, dtype=torch.uint8)
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def __enter__(self) -> StateStore:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _view(self, offset: int, nbytes: int, dtype: torch.dtype) -> Tensor:
        return self._memory[offset : offset + nbytes].view(dtype)

    def _load(self, offset: int, nbytes: int, dtype: torch.dtype) -> Tensor:
        assert self._file is not None
        made = torch.empty(nbytes, dtype=torch.uint8)
        try:
            read_into(self._file, offset, made.numpy().data)
        except EOFError:
            raise OutputError(f"{self._directory}: the file with the batches' states was cut short") from None
        return made.view(dtype)

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


def _stretches(numbers: Tensor) -> Iterator[tuple[int, int, int]]:
    """(Place of the first, first number, count) of each run of numbers that follow each other."""
    if not len(numbers):
        return
    starts = [0, *((numbers[1:] - numbers[:-1] != 1).nonzero().squeeze(1) + 1).tolist(), len(numbers)]
    for start, end in pairwise(starts):
        yield start, int(numbers[start]), end - start


class _Space:
    """Which bytes are in use: first fit, neighbours joined. `size` None: without end."""

    def __init__(self, size: int | None) -> None:
        self._gaps: list[tuple[int, int]] = [] if size is None else [(0, size)]
        self._end = 0 if size is None else None

    @property
    def free(self) -> int:
        return sum(end - start for start, end in self._gaps)

    def take(self, nbytes: int) -> int | None:
        nbytes = _aligned(nbytes)
        for index, (start, end) in enumerate(self._gaps):
            if end - start >= nbytes:
                self._gaps[index : index + 1] = [(start + nbytes, end)] if end - start > nbytes else []
                return start
        if self._end is None:
            return None
        self._end += nbytes
        return self._end - nbytes

    def give(self, offset: int, nbytes: int) -> None:
        if not nbytes:
            return
        gap = offset, offset + _aligned(nbytes)
        insort(self._gaps, gap)
        index = self._gaps.index(gap)
        for left in (index, index - 1):
            if 0 <= left < len(self._gaps) - 1 and self._gaps[left][1] == self._gaps[left + 1][0]:
                self._gaps[left : left + 2] = [(self._gaps[left][0], self._gaps[left + 1][1])]


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
