"""Moves of bytes between files: as they are and cast, in parts, from files that end early."""

import errno
import os
from unittest.mock import Mock

import numpy as np
import pytest

from prunecli.errors import CheckpointError
from prunecli.tensors import copying
from prunecli.tensors.copying import Gather, Move, reserve

DATA = np.random.default_rng(0).standard_normal(3000).astype(np.float32)


@pytest.fixture
def files(tmp_path):
    (tmp_path / "source").write_bytes(b"head" + DATA.tobytes())
    source = os.open(tmp_path / "source", os.O_RDONLY)
    target = os.open(tmp_path / "target", os.O_RDWR | os.O_CREAT)
    yield source, target
    os.close(source)
    os.close(target)


def move(files: tuple[int, int], nbytes: int = DATA.nbytes, at: int = 8) -> Move:
    return Move("dir: fc1", files[0], 4, nbytes, files[1], at)


def test_goes_on_after_short_reads_and_writes(files, monkeypatch):
    read, write = os.preadv, os.pwrite
    monkeypatch.setattr(copying, "BLOCK_BYTES", 1000)
    monkeypatch.setattr(os, "preadv", lambda file, buffers, at: read(file, [buffers[0][:77]], at))
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: write(file, data[:55], at))
    Gather((move(files, at=4),)).carry_out()
    assert os.pread(files[1], 20000, 4) == DATA.tobytes()


def test_parts_make_the_whole(files, monkeypatch):
    monkeypatch.setattr(copying, "JOB_BYTES", 4096)
    parts = move(files).parts()
    assert [part.nbytes for part in parts] == [4096, 4096, 3808]
    assert sum(Gather((part,)).carry_out() for part in reversed(parts)) == DATA.nbytes
    assert os.pread(files[1], 20000, 8) == DATA.tobytes()


def test_source_that_ends_early(files):
    with pytest.raises(CheckpointError, match="dir: fc1: its file ended early"):
        Gather((move(files, DATA.nbytes + 4),)).carry_out()


def test_full_disk(files, monkeypatch):
    monkeypatch.setattr(os, "pwrite", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        Gather((move(files, at=4),)).carry_out()


def test_more_than_the_disk_holds_is_refused_at_once(files):
    reserve(files[1], 0)
    reserve(files[1], 1)
    if os.fstat(files[1]).st_size != 1:
        pytest.skip("this file system cannot reserve")
    with pytest.raises(OSError, match=r"No space|too large|quota"):
        reserve(files[1], 1 << 62)
