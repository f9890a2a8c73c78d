"""Lower bounds of a pass: how fast this machine reads files, and multiplies."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch.utils.benchmark import Timer

CHUNK = 16 << 20


def weight_files(path: Path) -> list[Path]:
    return sorted([*path.glob("*.safetensors"), *path.glob("*.bin")])


def forget_all(path: Path) -> None:
    """Ask for the weight files of a checkpoint to leave the page cache."""
    os.sync()
    for file in weight_files(path):
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def disk_speed(path: Path, most_bytes: int) -> float:
    """Bytes a second of reading the weight files one after another, up to the limit, from the disk."""
    forget_all(path)
    buffer = memoryview(bytearray(min(CHUNK, most_bytes)))
    done, start = 0, time.perf_counter()
    for file in weight_files(path):
        with file.open("rb", buffering=0) as opened:
            while got := opened.readinto(buffer[: most_bytes - done]):
                done += got
    return done / (time.perf_counter() - start)


def product_speed(inputs: int, outputs: int, seconds: float) -> float:
    """Operations a second (two a multiply-add) of 512 rows times a matrix in float32, measured for so many seconds."""
    rows = 512
    given = {"left": torch.randn(rows, inputs), "right": torch.randn(inputs, outputs)}
    timer = Timer("left @ right", globals=given, num_threads=torch.get_num_threads())
    return float(2 * rows * inputs * outputs / timer.blocked_autorange(min_run_time=seconds).median)
