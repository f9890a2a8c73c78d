"""States in a file, and files that are no whole snapshots."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from prunecli.modules.trees import leaves, map_tree, outline
from prunecli.running.layerwise.states import (
    StateStore,
    Stored,
    read_header,
    read_snapshot,
    write_snapshot,
)

TREE = {
    "outputs": [{"encoder": (torch.randn(3, 4), None, [torch.randn(2)])}, {"decoder": torch.zeros(0, 3)}],
    "encoded": [torch.randn(2, 3).bfloat16(), 5],
}


def same(one: Any, other: Any) -> bool:
    parts = leaves(one, torch.Tensor), leaves(other, torch.Tensor)
    equal = all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(*parts, strict=True))
    return equal and outline(one, torch.Tensor) == outline(other, torch.Tensor)


@pytest.fixture
def written(tmp_path: Path) -> Path:
    path = tmp_path / ".gates.json.layers"
    with StateStore(64) as states:
        held = map_tree(TREE, states.put, torch.Tensor)
        write_snapshot(path, {"stage": 3}, held, states)
    return path


@pytest.mark.parametrize("memory", [0, 100, 1 << 16])
def test_a_snapshot_comes_back(written: Path, memory: int) -> None:
    assert read_header(written) == {"stage": 3}
    with StateStore(memory) as states:
        tree = read_snapshot(written, states)
        assert same(map_tree(tree, states.get, Stored), TREE)
    assert [path.name for path in written.parent.iterdir()] == [written.name]


@pytest.mark.parametrize("cut", [0, 30])
def test_a_file_that_was_cut_short_is_none(written: Path, cut: int) -> None:
    written.write_bytes(written.read_bytes()[:cut])
    assert read_header(written) is None


@pytest.mark.parametrize("content", [b"{}", b"\xff" * 40, b"\x02" + b"\0" * 7 + b"[]", b""])
def test_another_file_is_none(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(content)
    assert read_header(tmp_path / "file") is None
    assert read_header(tmp_path / "missing") is None


def test_a_full_disk_leaves_the_last_one(written: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: shutil._ntuple_diskusage(100, 100, 10))
    with StateStore(1 << 12) as states:
        held = states.put(torch.zeros(100))
        with pytest.raises(OSError, match="No space left"):
            write_snapshot(written, {"stage": 4}, held, states)
    assert read_header(written) == {"stage": 3}
