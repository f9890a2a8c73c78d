"""What fits into a given memory, and in which groups batches go."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from prunecli.errors import OutputError, UsageError
from prunecli.model.checkpoint import open_model
from prunecli.running.layerwise import session as module
from prunecli.running.layerwise.session import BatchCost, Machinery, Resources, RunReport, Session
from prunecli.tensors.quantities import parse_size
from tests.families import tiny_family
from tests.running.layerwise.running import CPU
from tests.tiny import tiny_nllb_moe

MIB, PLENTY = 1 << 20, 1 << 34


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tiny_family(tmp_path / "model", "llama")


def session_of(path: Path, memory: int = PLENTY, spill: Path | None = None) -> Session:
    return Session(open_model(path), Resources(CPU, torch.float32, memory, spill), RunReport())


def no_room(monkeypatch: pytest.MonkeyPatch, memory: int, disk: int) -> None:
    monkeypatch.setattr(Session, "_room", lambda _self, _plan: memory)
    monkeypatch.setattr(module, "disk_room", lambda _directory: disk)


def test_batches_that_find_room_go_together(path: Path) -> None:
    (group,) = session_of(path).groups([BatchCost(5, 100), BatchCost(9, 10), BatchCost(2, 1)])
    assert (group.numbers, group.states, group.activations) == ((0, 1, 2), 111, 9)
    assert group.plan.buffers == 3


def test_others_are_cut_in_their_order(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_room(monkeypatch, 60, 50)
    needs = [BatchCost(0, states) for states in (100, 10, 1, 80, 30, 109)]
    groups = session_of(path).groups(needs)
    assert [group.numbers for group in groups] == [(0, 1), (2, 3), (4,), (5,)]
    assert [group.states for group in groups] == [110, 81, 30, 109]


def test_no_batches_make_no_group(path: Path) -> None:
    assert session_of(path).groups([]) == []


def test_one_batch_that_finds_no_room_anywhere(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_room(monkeypatch, 60, 50)
    with pytest.raises(OutputError, match=rf"{tmp_path}: no room for the states of one batch"):
        session_of(path, spill=tmp_path).groups([BatchCost(0, 10), BatchCost(0, 111)])


def test_a_directory_that_is_not_there(path: Path, tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="nowhere"):
        session_of(path, spill=tmp_path / "nowhere").groups([BatchCost(0, 10)])


def test_too_little_memory_names_the_smallest_that_works(path: Path) -> None:
    session = session_of(path, MIB)
    with pytest.raises(UsageError, match="--memory 1MiB is too little") as caught:
        session.groups([BatchCost(300 * MIB, 10)])
    named = re.search(r"smallest that works is (\S+)", caught.value.message)
    assert named
    smallest = parse_size(named[1])
    assert smallest > 300 * MIB
    session._means = Resources(CPU, torch.float32, smallest)
    assert session.groups([BatchCost(300 * MIB, 10)])


def test_a_run_says_what_it_took_and_gives_everything_back(path: Path, tmp_path: Path) -> None:
    session = session_of(path, spill=tmp_path)
    (group,) = session.groups([BatchCost(0, 1000)])
    for times in (1, 2):
        with session.running(group) as machinery:
            machinery.make_room()
            stage = session.skeleton.stages[0]
            machinery.reader.want(stage.block)
            machinery.reader.give_back(machinery.reader.take())
            machinery.states.put(torch.zeros(4 * MIB))
            assert list(tmp_path.iterdir()) == [tmp_path / "model"], "the file has no name"
        layer = sum(session._checkpoint.info(target.name).nbytes for target in stage.targets)
        resident = sum(session._checkpoint.info(place.name).nbytes for place in session.skeleton.resident)
        assert session._work.bytes_read == resident + times * layer, "what is outside of layers is read once"
        assert session._work.readings == times
        assert session._work.spilled_bytes == 16 * MIB
        assert machinery.states._file is None
        assert not machinery.reader._thread.is_alive()


def test_an_interrupted_run_gives_everything_back_too(path: Path) -> None:
    session = session_of(path)
    (group,) = session.groups([BatchCost(0, 1000)])
    used: list[Machinery] = []

    def interrupted() -> None:
        with session.running(group) as machinery:
            used.append(machinery)
            machinery.states.put(torch.zeros(4 * MIB))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert used[0].states._file is None
    assert not used[0].reader._thread.is_alive()


def test_sizes_of_a_model(tmp_path: Path, path: Path) -> None:
    shape = session_of(path).shape
    assert (shape.d_model, shape.ffn_dim, shape.heads, shape.experts, shape.itemsize) == (32, 48, 8, 0, 4)
    shape = session_of(tiny_nllb_moe(tmp_path / "moe", experts=6)).shape
    assert (shape.experts, shape.top_k) == (6, 2)
    assert session_of(tiny_family(tmp_path / "t5", "t5")).has_position_bias
    assert not session_of(path).has_position_bias
