"""Moves bytes from a weight file to its place in another: as they are or cast, block by block."""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from dataclasses import dataclass, replace

import numpy as np

from prunecli.errors import CheckpointError
from prunecli.tensors.dtypes import cast, itemsize, numpy_dtype
from prunecli.tensors.reader import read_into, write_from

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
        row_bytes: of a row, where only parts of each row go.
        picks: those parts, as (start, stop) bytes of a row; empty: all. `nbytes` is that of whole rows.
    """

    where: str
    source: int
    source_offset: int
    nbytes: int
    target: int
    target_offset: int
    cast: tuple[str, str] | None = None
    row_bytes: int = 0
    picks: tuple[tuple[int, int], ...] = ()

    @property
    def is_plain(self) -> bool:
        """Whether the bytes go as they are."""
        return self.cast is None and not self.picks

    @property
    def written(self) -> int:
        """Bytes that it writes."""
        return self.written_of(self.nbytes)

    def written_of(self, nbytes: int) -> int:
        """Bytes that its first `nbytes` become, those of whole rows."""
        if self.picks:
            nbytes = nbytes // self.row_bytes * sum(stop - start for start, stop in self.picks)
        if self.cast is None:
            return nbytes
        return nbytes // itemsize(self.cast[0]) * itemsize(self.cast[1])

    def block_bytes(self, limit: int) -> int:
        """At most `limit`, in whole rows where rows matter, but one at least."""
        return max(limit // self.row_bytes, 1) * self.row_bytes if self.picks else limit

    def parts(self) -> list[Move]:
        """The same in moves of at most `JOB_BYTES`."""
        step = self.block_bytes(JOB_BYTES)
        return [
            replace(
                self,
                source_offset=self.source_offset + start,
                nbytes=min(step, self.nbytes - start),
                target_offset=self.target_offset + self.written_of(start),
            )
            for start in range(0, self.nbytes, step)
        ]

    def carry_out(self) -> int:
        """Do it; returns the bytes written. Moves with disjoint targets may be carried out side by side.

        Raises:
            CheckpointError: the source file ends early, or a value cannot be cast.
            OSError: the disk is full, among others.
        """
        step = self.block_bytes(BLOCK_BYTES)
        buffer = np.empty(min(step, self.nbytes), np.uint8)
        offset = self.target_offset
        for start in range(0, self.nbytes, step):
            block = buffer[: self.nbytes - start]
            # Not copy_file_range: tensors seldom keep their place within a page, and without that it is slower.
            try:
                read_into(self.source, self.source_offset + start, block.data)
            except EOFError:
                raise ended_early(self.where) from None
            values = self._picked(block)
            if self.cast is not None:
                values = cast(values.view(numpy_dtype(self.cast[0])), self.cast[1], self.where).view(np.uint8)
            write_from(self.target, offset, values.data)
            offset += values.nbytes
        return self.written

    def _picked(self, block: np.ndarray) -> np.ndarray:
        if not self.picks:
            return block
        rows = block.reshape(-1, self.row_bytes)
        return np.concatenate([rows[:, start:stop] for start, stop in self.picks], axis=1).reshape(-1)


def ended_early(where: str) -> CheckpointError:
    """What is said where a source file turns out shorter than its header said."""
    return CheckpointError(
        f"{where}: its file ended early while it was read", "Download or copy the file again."
    )


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
