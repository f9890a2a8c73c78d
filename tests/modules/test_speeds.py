"""What is measured of the machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from prunecli.errors import CheckpointError
from prunecli.modules import speeds
from prunecli.modules.speeds import Multiplying, Reading, disk_speed, forget, model_speed

LONG = 1e9


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    found = [tmp_path / name for name in ("a", "b")]
    for file, size in zip(found, (3000, 5000), strict=True):
        file.write_bytes(bytes(size))
    return found


@pytest.mark.parametrize(("most", "read"), [(10**6, 8000), (4000, 4000), (2000, 2000), (3000, 3000)])
def test_as_many_bytes_are_read_as_there_are_and_no_more_than_asked(
    files: list[Path], most: int, read: int
) -> None:
    assert disk_speed(files, most, LONG).bytes == read


def test_only_bytes_that_are_read_are_forgotten(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(
        os, "posix_fadvise", lambda _file, start, size, _advice: asked.append((start, size)), raising=False
    )
    monkeypatch.setattr(os, "POSIX_FADV_DONTNEED", 4, raising=False)
    assert disk_speed(files, 4000, LONG).from_disk
    assert asked == [(0, 4000), (0, 1000)]


def test_it_stops_when_time_is_over(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speeds, "CHUNK", 1000)
    ticks = iter(range(100))
    monkeypatch.setattr(speeds.time, "perf_counter", lambda: float(next(ticks)))
    # The clock is looked at before each of the reads: at 1, 2, 3 s; then at the end.
    found = disk_speed(files, 10**6, 3.0)
    assert (found.bytes, found.seconds) == (2000, 4.0)


def test_a_system_that_cannot_forget_is_said(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "posix_fadvise", raising=False)
    assert not forget(files[0])
    found = disk_speed(files, 10**6, LONG)
    assert (found.bytes, found.from_disk) == (8000, False)


def test_nothing_to_read_has_no_rate(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert disk_speed([], 1000, LONG).rate == 0
    assert disk_speed([tmp_path / "empty"], 1000, LONG).rate == 0
    assert Reading(100, 4.0, True).rate == 25


def test_a_file_that_is_gone_is_named(files: list[Path], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"c: cannot be read .No such file"):
        disk_speed([*files, tmp_path / "c"], 10**6, LONG)


def test_operations_are_two_a_multiply_add() -> None:
    found = model_speed(5, 7, torch.float32, torch.device("cpu"), 0.0)
    assert found.operations == 2 * speeds.MIN_ROWS * 5 * 7
    assert Multiplying(100, 4.0, 8.0).speed == 25


def test_a_large_matrix_is_cut_and_rows_grow_until_a_product_takes_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[tuple[int, ...]] = []

    def multiply(left: torch.Tensor, right: torch.Tensor, seconds: float) -> Multiplying:
        done.append((*left.shape, *right.shape))
        return Multiplying(1, left.shape[0] / 100, 1.0)

    monkeypatch.setattr(speeds, "MOST_WEIGHTS", 64)
    monkeypatch.setattr(speeds, "_repeat", multiply)
    model_speed(8, 1000, torch.float32, torch.device("cpu"), 10.0)
    assert [shape[0] for shape in done] == [64] * speeds.TRIES + [128] * speeds.TRIES + [256] * (
        speeds.TRIES + 1
    )
    assert {shape[1:] for shape in done} == {(8, 8, 8)}


def test_rows_end_somewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []

    def multiply(left: torch.Tensor, _right: torch.Tensor, _seconds: float) -> Multiplying:
        rows.append(left.shape[0])
        return Multiplying(1, 1e-9, 1.0)

    monkeypatch.setattr(speeds, "_repeat", multiply)
    model_speed(2, 2, torch.float32, torch.device("cpu"), 1.0)
    assert max(rows) == speeds.MOST_ROWS
