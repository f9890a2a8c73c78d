"""Copies bytes from weight files to their places in another file, block by block."""

import ctypes
import errno
import os
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from prunecli.errors import CheckpointError
from prunecli.tensors.reader import Handle, reading

JOB_BYTES = 16 << 20
"""Most source bytes of one `Move`."""

BLOCK_BYTES = 1 << 20
"""What a thread has in memory at a time; with less, threads wait for each other between blocks."""

REQUEST_BYTES = 32 << 20
"""Most bytes that are asked of a file elsewhere at once."""

GAP_BYTES = 64 << 10
"""Bytes that nobody wants between two wanted ranges, up to which both are one request: another request costs more."""

_WRITING = threading.Lock()

T = TypeVar("T")


@dataclass(frozen=True)
class Move:
    """`nbytes` of a source file that go to one place of a target file as they are.

    Attributes:
        where: source checkpoint and tensor, for messages.
        source: file; `source_offset` is a place in it.
        target: file descriptor; `target_offset` is a place in its file.
    """

    where: str
    source: Handle
    source_offset: int
    nbytes: int
    target: int
    target_offset: int


def write_from(file: int, offset: int, view: memoryview) -> None:
    """Write all bytes of `view` to a file from `offset` on.

    Threads take turns: the kernel lets one write to a file at a time, and on a virtual machine what spins for its turn
    keeps the one that has it from running.

    Raises:
        OSError: the disk is full, among others.
    """
    done = 0
    with _WRITING:
        while done < len(view):
            done += os.pwrite(file, view[done:], offset + done)


@dataclass(frozen=True)
class Gather:
    """Moves from neighbouring places of one file, in the order of their places: one request to a file elsewhere.

    Bytes between the places come too, and are dropped. Gathers with disjoint targets may be carried out side by side.
    """

    moves: tuple[Move, ...]

    @property
    def target_offset(self) -> int:
        """The first place that is written."""
        return min(move.target_offset for move in self.moves)

    @property
    def written(self) -> int:
        """Number of bytes that are written."""
        return sum(move.nbytes for move in self.moves)

    def carry_out(self) -> None:
        """Copy the bytes.

        Raises:
            CheckpointError: the source file ends early.
            OSError: the disk is full, among others.
        """
        first, last = self.moves[0], self.moves[-1]
        position = first.source_offset
        if isinstance(first.source, int) and hasattr(os, "posix_fadvise"):
            # Left to itself, the system reads megabytes ahead: between every second expert, the others too.
            with suppress(OSError):  # a pipe or the like
                os.posix_fadvise(first.source, 0, 0, os.POSIX_FADV_RANDOM)
                os.posix_fadvise(first.source, position, first.nbytes, os.POSIX_FADV_WILLNEED)
        fill = reading(first.source, position, last.source_offset + last.nbytes - position)
        for move in self.moves:
            buffer = memoryview(bytearray(min(BLOCK_BYTES, move.nbytes)))
            try:
                if gap := move.source_offset - position:
                    fill(memoryview(bytearray(gap)))
                for start in range(0, move.nbytes, BLOCK_BYTES):
                    block = buffer[: move.nbytes - start]
                    # Not copy_file_range: tensors seldom keep their place within a page, and without that it is slower.
                    fill(block)
                    write_from(move.target, move.target_offset + start, block)
            except EOFError:
                raise CheckpointError(
                    f"{move.where}: its file ended early while it was read",
                    "Download or copy the file again.",
                ) from None
            position = move.source_offset + move.nbytes


def gathered(moves: Iterable[Move]) -> list[Gather]:
    """Moves from neighbouring places together: without gaps from files here, in few requests from files elsewhere."""

    def place(move: Move) -> tuple[int, int, int]:
        return hash(move.source), move.source_offset, move.source_offset + move.nbytes

    here: list[Move] = []
    far: list[Move] = []
    for move in moves:
        (here if isinstance(move.source, int) else far).append(move)
    groups = near(here, place, 0, JOB_BYTES) + near(far, place, GAP_BYTES, REQUEST_BYTES)
    return [Gather(tuple(group)) for group in groups]


def near(
    items: Iterable[T], place: Callable[[T], tuple[int, int, int]], gap: int, most: int
) -> list[list[T]]:
    """Group items that lie near each other in one file and do not overlap, in the order of their places.

    Args:
        place: gives (file, start, stop) of an item.
        gap: bytes between two items of a group at most.
        most: bytes from the first to the last byte of a group at most.
    """
    groups: list[list[T]] = []
    held = begin = end = -1
    for file, start, stop, item in sorted(((*place(item), item) for item in items), key=lambda one: one[:3]):
        if file == held and 0 <= start - end <= gap and stop - begin <= most:
            groups[-1].append(item)
        else:
            groups.append([item])
            held, begin = file, start
        end = stop
    return groups


def reserve(target: int, nbytes: int) -> None:
    """Have the file system set `nbytes` aside for a file: a full disk shows at once, and writing gets faster.

    Where the file system or the system cannot, nothing happens. (`os.posix_fallocate` would write to every block.)

    Raises:
        OSError: the disk is full.
    """
    try:
        fallocate = ctypes.CDLL(None, use_errno=True).fallocate
    except (OSError, AttributeError):
        return
    fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    if fallocate(target, 0, 0, nbytes) and ctypes.get_errno() in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
