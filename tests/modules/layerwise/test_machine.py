"""What the machine says it has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from prunecli.errors import OutputError
from prunecli.modules.layerwise.machine import (
    container_room,
    disk_room,
    free_memory,
    keep_below,
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
