"""Moves bytes from a weight file to its place in another: copied by the kernel, or cast block by block."""

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

COPY_BYTES = 1 << 20
"""What is in memory of a copy at a time."""

CAST_BYTES = 256 << 10
"""What is in memory of a cast at a time; within a core's cache it runs twice as fast."""

PAGE_BYTES = 4096

_NO_KERNEL_COPY = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.ETXTBSY}


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
    done = _kernel_copy(move)
    block = np.empty(min(COPY_BYTES, move.nbytes - done), np.uint8).data
    while done < move.nbytes:
        piece = block[: move.nbytes - done]
        _read(move, done, piece)
        _write(move.target, move.target_offset + done, piece)
        done += len(piece)


def _kernel_copy(move: Move) -> int:
    """Bytes that the kernel copied: all of them, or fewer where it cannot copy between these files.

    It can share pages instead of copying them, or have a file server do it; where the two places lie
    differently within their pages it can do neither on a local disk, and is 40 % slower than reading and writing.
    """
    done = 0
    if (move.source_offset - move.target_offset) % PAGE_BYTES:
        return done
    while hasattr(os, "copy_file_range") and done < move.nbytes:
        try:
            count = os.copy_file_range(
                move.source,
                move.target,
                move.nbytes - done,
                offset_src=move.source_offset + done,
                offset_dst=move.target_offset + done,
            )
        except OSError as error:
            if error.errno not in _NO_KERNEL_COPY:
                raise
            break
        if count == 0:  # the end of the file, or a file system that only says so: a plain read will tell
            break
        done += count
    return done


def _cast(move: Move, given: str, wanted: str) -> None:
    block = np.empty(min(CAST_BYTES, move.nbytes), np.uint8).data
    at = move.target_offset
    for start in range(0, move.nbytes, CAST_BYTES):
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
