"""Moves bytes from a weight file to its place in another: as they are or cast, block by block."""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from dataclasses import dataclass

import numpy as np

from prunecli.checkpoint.casting import cast
from prunecli.checkpoint.dtypes import itemsize, numpy_dtype
from prunecli.errors import CheckpointError

JOB_BYTES = 16 << 20
"""Most source bytes of one `Move`."""

BLOCK_BYTES = 1 << 20
"""What a thread has in memory at a time; with less, threads wait for each other between blocks."""


@dataclass(frozen=True)
class Move:
    """`nbytes` of a source file that go to one place of a target file.

    Attributes:
        where: source checkpoint and tensor, for messages.
        source: file descriptor; `source_offset` in its file.
        target: file descriptor; `target_offset` in its file.
        cast: safetensors types (from, to), or None where the bytes stay as they are.
    """

    where: str
    source: int
    source_offset: int
    nbytes: int
    target: int
    target_offset: int
    cast: tuple[str, str] | None = None

    @property
    def written(self) -> int:
        """Bytes that it writes."""
        if self.cast is None:
            return self.nbytes
        return self.nbytes // itemsize(self.cast[0]) * itemsize(self.cast[1])

    def parts(self) -> list[Move]:
        """The same in moves of at most `JOB_BYTES`."""
        return [
            Move(
                self.where,
                self.source,
                self.source_offset + start,
                min(JOB_BYTES, self.nbytes - start),
                self.target,
                self.target_offset + Move("", 0, 0, start, 0, 0, self.cast).written,
                self.cast,
            )
            for start in range(0, self.nbytes, JOB_BYTES)
        ]


def carry_out(move: Move) -> int:
    """Do it; returns the bytes written. Moves with disjoint targets may be carried out side by side.

    Raises:
        CheckpointError: the source file ends early, or a value cannot be cast.
        OSError: the disk is full, among others.
    """
    if move.cast is None:
        _copy(move)
    else:
        _cast(move, *move.cast)
    return move.written


def reserve(target: int, nbytes: int) -> None:
    """Have the file system set `nbytes` aside for a file: a full disk shows at once, and writing gets faster.

    Where the file system or the system cannot, nothing happens. (`os.posix_fallocate` would write to every block.)

    Raises:
        OSError: the disk is full.
    """
    if not nbytes or not sys.platform.startswith("linux"):
        return
    try:
        fallocate = ctypes.CDLL(None, use_errno=True).fallocate
    except (OSError, AttributeError):
        return
    fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    if fallocate(target, 0, 0, nbytes) and ctypes.get_errno() in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _copy(move: Move) -> None:
    # Not copy_file_range: tensors seldom keep their place within a page, and without that it is slower.
    block = np.empty(min(BLOCK_BYTES, move.nbytes), np.uint8).data
    for start in range(0, move.nbytes, BLOCK_BYTES):
        piece = block[: move.nbytes - start]
        _read(move, start, piece)
        _write(move.target, move.target_offset + start, piece)


def _cast(move: Move, given: str, wanted: str) -> None:
    block = np.empty(min(BLOCK_BYTES, move.nbytes), np.uint8).data
    at = move.target_offset
    for start in range(0, move.nbytes, BLOCK_BYTES):
        piece = block[: move.nbytes - start]
        _read(move, start, piece)
        made = cast(np.frombuffer(piece, dtype=numpy_dtype(given)), wanted, move.where)
        data = made.view(np.uint8).data
        _write(move.target, at, data)
        at += len(data)


def _read(move: Move, start: int, into: memoryview) -> None:
    done = 0
    while done < len(into):
        count = os.preadv(move.source, [into[done:]], move.source_offset + start + done)
        if count == 0:
            raise CheckpointError(
                f"{move.where}: its file ended early while it was read", "Download or copy the file again."
            )
        done += count


def _write(target: int, offset: int, data: memoryview) -> None:
    while len(data):
        count = os.pwrite(target, data, offset)
        data, offset = data[count:], offset + count
