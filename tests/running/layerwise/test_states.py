"""Tensors come back as they were put, wherever they were."""

import errno
import os
import shutil
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from prunecli.errors import OutputError
from prunecli.running.layerwise.states import (
    StateStore,
    Stored,
    leaves,
    map_tree,
    outline,
    read_header,
    read_snapshot,
    write_snapshot,
)


@pytest.mark.parametrize("memory", [1 << 16, 0])
def test_rows_are_read_and_replaced(memory):
    want = torch.arange(60.0).view(12, 5)
    with StateStore(memory) as states:
        held = states.put(want)
        assert held.in_memory == bool(memory)
        assert torch.equal(states.rows(held, 3, 7), want[3:7])
        states.write(held, 4, -want[4:6])
        want[4:6] *= -1
        assert torch.equal(states.get(held), want)


def test_the_file_has_no_name_and_is_made_only_when_needed(tmp_path):
    with StateStore(4096, tmp_path) as states:
        states.put(torch.zeros(1024))
        assert states.spilled_bytes == 0
        states.put(torch.zeros(1024))
        assert states.spilled_bytes == 4096
        assert list(tmp_path.iterdir()) == []


def test_room_is_used_again():
    with StateStore(0) as states:
        for _ in range(50):
            held = [states.put(torch.ones(100)) for _ in range(3)]
            for one in held:
                states.drop(one)
        assert states.spilled_bytes == 2 * 448 + 400


def test_a_full_disk_is_said_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(
        os, "posix_fallocate", Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    )
    with StateStore(0, tmp_path) as states:
        with pytest.raises(OutputError, match="no room") as caught:
            states.put(torch.zeros(10))
        assert str(tmp_path) in caught.value.message
        assert "`spill_directory`" in str(caught.value.remedy)


@pytest.mark.parametrize("way", ["missing", "a file"])
def test_a_directory_that_is_none(way, tmp_path):
    path = tmp_path / "nowhere"
    if way == "a file":
        path.write_text("")
    with StateStore(0, path) as states, pytest.raises(OutputError, match="nowhere"):
        states.put(torch.zeros(10))


TREE = {
    "outputs": [{"encoder": (torch.randn(3, 4), None, [torch.randn(2)])}, {"decoder": torch.zeros(0, 3)}],
    "encoded": [torch.randn(2, 3).bfloat16(), 5],
}


def same(one: Any, other: Any) -> bool:
    parts = leaves(one, torch.Tensor), leaves(other, torch.Tensor)
    equal = all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(*parts, strict=True))
    return equal and outline(one, torch.Tensor) == outline(other, torch.Tensor)


@pytest.fixture
def written(tmp_path):
    path = tmp_path / ".gates.json.layers"
    with StateStore(64) as states:
        held = map_tree(TREE, states.put, torch.Tensor)
        write_snapshot(path, {"stage": 3}, held, states)
    return path


@pytest.mark.parametrize("memory", [0, 100, 1 << 16])
def test_a_snapshot_comes_back(written, memory):
    assert read_header(written) == {"stage": 3}
    with StateStore(memory) as states:
        tree = read_snapshot(written, states)
        assert same(map_tree(tree, states.get, Stored), TREE)
    assert [path.name for path in written.parent.iterdir()] == [written.name]


@pytest.mark.parametrize("cut", [0, 30])
def test_a_file_that_was_cut_short_is_none(written, cut):
    written.write_bytes(written.read_bytes()[:cut])
    assert read_header(written) is None


@pytest.mark.parametrize("content", [b"{}", b"\xff" * 40, b"\x02" + b"\0" * 7 + b"[]", b""])
def test_another_file_is_none(content, tmp_path):
    (tmp_path / "file").write_bytes(content)
    assert read_header(tmp_path / "file") is None
    assert read_header(tmp_path / "missing") is None


def test_a_full_disk_leaves_the_last_one(written, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: shutil._ntuple_diskusage(100, 100, 10))
    with StateStore(1 << 12) as states:
        held = states.put(torch.zeros(100))
        with pytest.raises(OSError, match="No space left"):
            write_snapshot(written, {"stage": 4}, held, states)
    assert read_header(written) == {"stage": 3}
