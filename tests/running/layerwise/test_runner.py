"""What fits into a given memory, and in which groups batches go."""

import os
import re
import shutil
import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prunecli.errors import OutputError, UsageError
from prunecli.model.checkpoint import open_model
from prunecli.running.layerwise.budget import MIN_STATES, SPREAD, WORKSPACE, Demand
from prunecli.running.layerwise.runner import Layerwise
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
from prunecli.running.runner import BatchCost, Group
from prunecli.tensors.quantities import parse_size, size_text
from tests.commands.calls import names
from tests.failing import FULL
from tests.running.layerwise.running import CPU, no_room

MIB, PLENTY = 1 << 20, 1 << 34


@pytest.fixture
def path(models):
    return models["llama"]


def layers_of(path: Path, memory: int = PLENTY, spill: Path | None = None) -> Layerwise:
    return Layerwise(open_model(path), CPU, torch.float32, memory, spill)


def groups(layers: Layerwise, *costs: tuple[int, int]) -> list[Group[BatchCost]]:
    """Groups of batches that are named by their sizes."""
    batches = [BatchCost(activations, (states,)) for activations, states in costs]
    return list(layers.groups(batches, lambda _layers, batch: batch))


def test_others_are_cut_in_their_order(path, monkeypatch):
    no_room(monkeypatch, 60, 50)
    found = groups(layers_of(path), *((0, states) for states in (100, 10, 1, 80, 30, 109)))
    assert [(group.start, len(group.batches)) for group in found] == [(0, 2), (2, 2), (4, 1), (5, 1)]
    assert [group.cost.states for group in found] == [(110,), (81,), (30,), (109,)]


def test_the_fullest_phase_counts(path, monkeypatch):
    no_room(monkeypatch, 60, 50)
    batches = [BatchCost(0, (100, 1)), BatchCost(0, (1, 100)), BatchCost(0, (1, 10))]
    found = list(layers_of(path).groups(iter(batches), lambda _layers, batch: batch, start=7))
    assert [(group.start, group.cost.states) for group in found] == [(7, (101, 101)), (9, (1, 10))]


def test_one_batch_that_finds_no_room_anywhere(path, monkeypatch):
    no_room(monkeypatch, 60, 50)
    with pytest.raises(OutputError, match=r"^spill: no room for the states of one batch"):
        groups(layers_of(path, spill=Path("spill")), (0, 10), (0, 111))


def test_too_little_memory_names_the_smallest_that_works(path):
    with pytest.raises(UsageError, match="memory=1MiB` is too little") as caught:
        groups(layers_of(path, MIB), (1, 10), (300 * MIB, 10))
    named = re.search(r"smallest that works is (\S+)", caught.value.message)
    smallest = parse_size(named[1])
    assert smallest > 300 * MIB
    assert groups(layers_of(path, smallest), (300 * MIB, 10))


def test_a_run_says_what_it_took_and_gives_everything_back(path):
    ids = torch.tensor([[5, 9, 12, 2]])
    layers, threads = layers_of(path, spill=Path()), threading.active_count()
    report = layers.report
    (group,) = groups(layers, (0, 1000))
    checkpoint = open_model(path)
    output = layers.model.get_output_embeddings().weight  # which does not run
    bytes_of = {
        name: checkpoint.info(name).nbytes
        for name in checkpoint.tensors
        if layers.model.get_parameter(name) is not output
    }
    resident = sum(bytes_of[place.name] for place in layers.skeleton.resident)
    for times in (1, 2):
        with layers.running(group) as run:
            run.forward([lambda: layers.model(input_ids=ids, use_cache=False)])
            run.keep(torch.zeros(4 * MIB))
            assert names() == [], "the file has no name"
        expected = resident + times * (sum(bytes_of.values()) - resident)
        assert report.bytes_read == expected, "what is outside of layers is read once"
        assert report.readings == times
        assert report.spilled_bytes == 16 * MIB
        assert threading.active_count() == threads


# Tensors come back as they were put, wherever they were.


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


def test_the_file_has_no_name_and_is_made_only_when_needed():
    with StateStore(4096, Path()) as states:
        states.put(torch.zeros(1024))
        assert states.spilled_bytes == 0
        states.put(torch.zeros(1024))
        assert states.spilled_bytes == 4096
        assert names() == []


def test_room_is_used_again():
    with StateStore(0) as states:
        for _ in range(50):
            held = [states.put(torch.ones(100)) for _ in range(3)]
            for one in held:
                states.drop(one)
        assert states.spilled_bytes == 2 * 448 + 400


def test_a_full_disk_is_said_before_anything_is_written(monkeypatch):
    Path("spill").mkdir()
    monkeypatch.setattr(os, "posix_fallocate", Mock(side_effect=FULL))
    said = r"^spill: no room.*\n.*`spill_directory`"
    with StateStore(0, Path("spill")) as states, pytest.raises(OutputError, match=said):
        states.put(torch.zeros(10))


@pytest.mark.parametrize("way", ["missing", "a file"])
def test_a_directory_that_is_none(way):
    nowhere = Path("nowhere")
    if way == "a file":
        nowhere.touch()
    with StateStore(0, nowhere) as states, pytest.raises(OutputError, match="nowhere"):
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
def written():
    path = Path(".gates.json.layers")
    with StateStore(64) as states:
        write_snapshot(path, {"stage": 3}, map_tree(TREE, states.put, torch.Tensor), states)
    return path


@pytest.mark.parametrize("memory", [0, 100, 1 << 16])
def test_a_snapshot_comes_back(written, memory):
    assert read_header(written) == {"stage": 3}
    with StateStore(memory) as states:
        assert same(map_tree(read_snapshot(written, states), states.get, Stored), TREE)
    assert names() == [written.name]


@pytest.mark.parametrize("cut", [0, 30])
def test_a_file_that_was_cut_short_is_none(written, cut):
    written.write_bytes(written.read_bytes()[:cut])
    assert read_header(written) is None


@pytest.mark.parametrize("content", [b"{}", b"\xff" * 40, b"\x02" + b"\0" * 7 + b"[]", b""])
def test_another_file_is_none(content):
    Path("file").write_bytes(content)
    assert read_header(Path("file")) is None
    assert read_header(Path("missing")) is None


def test_a_full_disk_leaves_the_last_one(written, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: shutil._ntuple_diskusage(100, 100, 10))
    with StateStore(1 << 12) as states:
        held = states.put(torch.zeros(100))
        with pytest.raises(OSError, match="No space left"):
            write_snapshot(written, {"stage": 4}, held, states)
    assert read_header(written) == {"stage": 3}


GIB = 1 << 30
DEMAND = Demand(process=400 * MIB, resident=2 * GIB, block=256 * MIB)


def test_what_is_left_is_for_states_if_three_buffers_find_room():
    fixed = (400 + 2048 + 300 + 3 * 256) * MIB + WORKSPACE
    assert DEMAND.plan(8 * GIB, 300 * MIB) == (3, 8 * GIB - fixed)
    assert DEMAND.plan(fixed + MIN_STATES, 300 * MIB) == (3, MIN_STATES)
    assert DEMAND.plan(fixed + MIN_STATES - 1, 300 * MIB)[0] == 2


@given(st.tuples(*[st.integers(0, 1 << 38)] * 4))
def test_the_smallest_that_is_named_works_and_little_less_does_not(sizes):
    *others, activations = sizes
    demand = Demand(*others)
    with pytest.raises(UsageError) as caught:
        demand.plan(1, activations)
    named = re.search(r"smallest that works is (\S+)", caught.value.message)
    smallest = parse_size(named[1])
    assert demand.plan(smallest, activations)[1] >= MIN_STATES
    with pytest.raises(UsageError, match="too little"):
        demand.plan(int(smallest * 0.98) - 2 * MIB - SPREAD, activations)
    assert caught.value.exit_status == 2


@given(st.integers(1, 1 << 41))
def test_sizes_are_rounded_up_and_read_back(size):
    assert size <= parse_size(size_text(size)) <= max(size + MIB, size * 1.011)
