"""How fast this machine reads and multiplies, measured."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from prunecli.errors import CheckpointError

CHUNK = 16 << 20
MOST_WEIGHTS = 1 << 22
"""Elements of the largest matrix that is multiplied; a larger one is as fast."""

MIN_ROWS, MOST_ROWS = 64, 4096
TRIES = 2
"""One product alone may be held up by other work of the machine."""


@dataclass(frozen=True)
class Reading:
    """What was read, and in how many seconds.

    Attributes:
        from_disk: whether the system was asked to forget these bytes first; else they may have come from its memory.
    """

    bytes: int
    seconds: float
    from_disk: bool

    @property
    def rate(self) -> float:
        """Bytes a second; 0 where nothing was read."""
        return self.bytes / self.seconds if self.bytes else 0.0


@dataclass(frozen=True)
class Multiplying:
    """Operations (two a multiply-add) that were done, in how many seconds, and of processor time of all threads."""

    operations: int
    seconds: float
    processor_seconds: float

    @property
    def speed(self) -> float:
        """Operations a second."""
        return self.operations / self.seconds


def forget(file: Path, size: int = 0) -> bool:
    """Ask for the first `size` bytes of a file (0: all) to leave the page cache; whether that could be asked.

    Pages that are not yet written stay.
    """
    if not hasattr(os, "posix_fadvise"):
        return False
    try:
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, size, os.POSIX_FADV_DONTNEED)
    except OSError:
        return False
    return True


def disk_speed(files: Sequence[Path], most_bytes: int, most_seconds: float) -> Reading:
    """Read the files one after another, up to either limit, from the disk where the system can be asked for that.

    Raises:
        CheckpointError: one of them cannot be read.
    """
    buffer = bytearray(min(CHUNK, most_bytes))
    view = memoryview(buffer)
    done, seconds, fresh = 0, 0.0, True
    for file in files:
        if done >= most_bytes or seconds >= most_seconds:
            break
        fresh &= forget(file, most_bytes - done)
        start = time.perf_counter()
        try:
            with file.open("rb", buffering=0) as opened:
                while seconds + time.perf_counter() - start < most_seconds:
                    got = opened.readinto(view[: most_bytes - done])
                    done += got or 0
                    if not got:
                        break
        except OSError as error:
            raise CheckpointError(
                f"{file}: cannot be read ({error.strerror})", "Copy the file again."
            ) from error
        seconds += time.perf_counter() - start
    return Reading(done, seconds, fresh)


def model_speed(
    model_dim: int, ffn_dim: int, dtype: torch.dtype, device: torch.device, seconds: float
) -> Multiplying:
    """Multiply an FFN's first matrix by as many rows as this machine can do in the time, again and again."""
    inputs = max(1, model_dim)
    outputs = max(1, min(ffn_dim, MOST_WEIGHTS // inputs))
    right = torch.randn(inputs, outputs, device=device).to(dtype)
    rows = MIN_ROWS
    with torch.inference_mode():
        torch.mm(right.new_ones(rows, inputs), right)  # what is only done once
        while True:
            left = torch.randn(rows, inputs, device=device).to(dtype)
            _finish(device)
            once = min(_repeat(left, right, 0.0).seconds for _ in range(TRIES))
            if rows == MOST_ROWS or once > seconds / 4:
                return _repeat(left, right, seconds)
            rows *= 2


def _repeat(left: torch.Tensor, right: torch.Tensor, seconds: float) -> Multiplying:
    products = 0
    start, busy = time.perf_counter(), time.process_time()
    while products == 0 or time.perf_counter() - start < seconds:
        torch.mm(left, right)
        _finish(left.device)
        products += 1
    done = 2 * products * left.shape[0] * right.numel()
    return Multiplying(done, time.perf_counter() - start, time.process_time() - busy)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
