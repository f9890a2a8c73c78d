"""What is measured of the machine."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from prunecli.modules import machine
from prunecli.modules.machine import disk_speed, product_speed

LONG = 1e9


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    found = [tmp_path / name for name in ("a", "b")]
    for file, size in zip(found, (3000, 5000), strict=True):
        file.write_bytes(bytes(size))
    return found


class Clock:
    """A clock that a look at takes a second."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        self.now += 1
        return self.now


@pytest.mark.parametrize(
    ("most", "seconds", "bytes_read", "looks"),
    [(10**6, LONG, 8000, 11), (4000, LONG, 4000, 7), (2000, LONG, 2000, 4), (10**6, 4.0, 3000, 6)],
)
def test_as_many_bytes_are_read_as_are_asked_and_as_there_is_time_for(
    files: list[Path], most: int, seconds: float, bytes_read: int, looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "CHUNK", 1000)
    monkeypatch.setattr(machine, "time", Clock())
    assert disk_speed(files, most, seconds).rate == bytes_read / looks


def test_only_bytes_that_are_read_are_forgotten(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(
        os, "posix_fadvise", lambda _file, start, size, _advice: asked.append((start, size)), raising=False
    )
    monkeypatch.setattr(os, "POSIX_FADV_DONTNEED", 4, raising=False)
    assert disk_speed(files, 4000, LONG).from_disk
    assert asked == [(0, 4000), (0, 1000)]


def test_operations_are_two_a_multiply_add(monkeypatch: pytest.MonkeyPatch) -> None:
    class Timer:
        def __init__(self, _statement: str, **options: Any) -> None:
            self.shapes = [tuple(options["globals"][name].shape) for name in ("left", "right")]

        def blocked_autorange(self, min_run_time: float) -> SimpleNamespace:
            assert self.shapes == [(512, 8), (8, 8)]  # the second is cut
            return SimpleNamespace(median=min_run_time)

    monkeypatch.setattr(machine, "MOST_WEIGHTS", 64)
    monkeypatch.setattr(machine, "Timer", Timer)
    assert product_speed(8, 1000, torch.float32, torch.device("cpu"), 0.5) == 2 * 512 * 8 * 8 / 0.5
