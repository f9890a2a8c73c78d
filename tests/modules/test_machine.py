"""What the machine says it has."""

from __future__ import annotations

import os
import platform
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from prunecli.errors import CheckpointError, OutputError
from prunecli.modules import machine
from prunecli.modules.machine import (
    Multiplying,
    Reading,
    available_memory,
    container_room,
    control_groups,
    disk_room,
    disk_speed,
    forget,
    free_memory,
    keep_below,
    matrix_speed,
    model_speed,
    resident_now,
)


def group(path: Path, limit: str) -> Path:
    (path / "memory.max").write_text(f"{limit}\n")
    (path / "memory.current").write_text("700\n")
    (path / "memory.stat").write_text("anon 400\ninactive_file 200\nactive_file 50\n")
    return path


@pytest.mark.parametrize(("limit", "room"), [("1000", 500), ("400", 0), ("max", None), ("", None)])
def test_a_container_s_limit(limit: str, room: int | None, tmp_path: Path) -> None:
    assert container_room(group(tmp_path, limit)) == room


@pytest.mark.parametrize(("limit", "room"), [("1000", 500), ("9223372036854771712", None), ("", None)])
def test_a_container_of_version_1(limit: str, room: int | None, tmp_path: Path) -> None:
    (tmp_path / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (tmp_path / "memory.usage_in_bytes").write_text("700\n")
    (tmp_path / "memory.stat").write_text("inactive_file 1\ntotal_inactive_file 200\n")
    assert container_room(tmp_path) == room


def test_groups_around_a_group_limit_it_too(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("9:name=systemd:/\n4:cpu,memory:/job/7\n0::/user/shell\n")
    assert [str(folder.relative_to(tmp_path)) for folder in control_groups(own, tmp_path)] == [
        *("memory/job/7", "memory/job", "memory"),
        *("user/shell", "user", "."),
    ]
    assert control_groups(tmp_path / "none", tmp_path) == [tmp_path]


def test_the_smallest_bound_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "control_groups", lambda: [tmp_path, group(tmp_path, "1000")])
    assert available_memory() == 500
    monkeypatch.setattr(machine, "process_room", lambda: 30)
    assert available_memory() == 30


def test_a_limit_of_the_process() -> None:
    code = (
        "import resource; from prunecli.modules.machine import available_memory; "
        "import psutil; used = psutil.Process().memory_info().vms; "
        "resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY)); "
        "print(available_memory())"
    )
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(made.stdout) <= 64 << 20


def test_no_container(tmp_path: Path) -> None:
    assert container_room(tmp_path) is None


def test_this_process_counts_as_free() -> None:
    assert free_memory(torch.device("cpu")) > resident_now() > 1 << 20


def test_a_disk_and_none(tmp_path: Path) -> None:
    assert disk_room(tmp_path) > 0
    assert disk_room(None) > 0
    with pytest.raises(OutputError, match="nowhere"):
        disk_room(tmp_path / "nowhere")


def test_freed_memory_goes_back_only_when_there_is_too_much() -> None:
    blocks = [torch.ones(1 << 14) for _ in range(2000)]  # 125 MiB, too small to be given back one by one
    last = torch.ones(1 << 14)  # and in the way of the heap's end
    full = resident_now()
    del blocks
    keep_below(full + (1 << 30))
    kept = resident_now()
    keep_below(0)
    assert resident_now() <= kept
    assert resident_now() < full - (60 << 20)
    assert last.sum() == 1 << 14


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told")
def test_freed_blocks_are_had_again_without_being_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "available_memory", lambda: 12 << 30)
    faults = []
    try:
        machine.keep_freed_blocks(1 << 30)
        for _ in range(8):  # the first ones leave holes of a few bytes too little for the next
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            torch.ones(1 << 24)
            faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
        full = resident_now()
    finally:
        machine.give_back()
    assert max(faults[4:]) < 0.1 * (64 << 20) / resource.getpagesize()
    assert resident_now() < full - (60 << 20)


def test_where_memory_is_not_plenty_the_c_library_is_told_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []
    monkeypatch.setattr(machine, "_tell", lambda *what: told.append(what))
    monkeypatch.setattr(machine, "available_memory", lambda: (12 << 30) - 1)
    machine.keep_freed_blocks(1 << 30)
    assert not told


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
    monkeypatch.setattr(machine, "CHUNK", 1000)
    ticks = iter(range(100))
    monkeypatch.setattr(machine.time, "perf_counter", lambda: float(next(ticks)))
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
    found = matrix_speed(3, 5, 7, torch.float32, torch.device("cpu"), 0.0)
    assert found.operations == 2 * 3 * 5 * 7
    assert Multiplying(100, 4.0, 8.0).speed == 25


def test_a_large_matrix_is_cut_and_rows_grow_until_a_product_takes_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[tuple[int, ...]] = []

    def multiply(left: torch.Tensor, right: torch.Tensor, seconds: float) -> Multiplying:
        done.append((*left.shape, *right.shape))
        return Multiplying(1, left.shape[0] / 100, 1.0)

    monkeypatch.setattr(machine, "MOST_WEIGHTS", 64)
    monkeypatch.setattr(machine, "_repeat", multiply)
    model_speed(8, 1000, torch.float32, torch.device("cpu"), 10.0)
    assert [shape[0] for shape in done] == [64] * machine.TRIES + [128] * machine.TRIES + [256] * (
        machine.TRIES + 1
    )
    assert {shape[1:] for shape in done} == {(8, 8, 8)}


def test_rows_end_somewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []

    def multiply(left: torch.Tensor, _right: torch.Tensor, _seconds: float) -> Multiplying:
        rows.append(left.shape[0])
        return Multiplying(1, 1e-9, 1.0)

    monkeypatch.setattr(machine, "_repeat", multiply)
    model_speed(2, 2, torch.float32, torch.device("cpu"), 1.0)
    assert max(rows) == machine.MOST_ROWS
