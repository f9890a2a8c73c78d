"""What fits into a given memory, and in which groups batches go."""

import re
import threading
from pathlib import Path

import pytest
import torch

from prunecli.errors import OutputError, UsageError
from prunecli.model.checkpoint import open_model
from prunecli.running.layerwise.runner import Layerwise, RunReport
from prunecli.running.runner import BatchCost, Group
from prunecli.tensors.quantities import parse_size
from tests.families import tiny_family
from tests.running.layerwise.running import CPU, no_room

MIB, PLENTY = 1 << 20, 1 << 34


@pytest.fixture
def path(tmp_path):
    return tiny_family(tmp_path / "model", "llama")


def layers_of(
    path: Path, memory: int = PLENTY, spill: Path | None = None, report: RunReport | None = None
) -> Layerwise:
    return Layerwise(open_model(path), CPU, torch.float32, memory, spill, report)


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


def test_one_batch_that_finds_no_room_anywhere(path, tmp_path, monkeypatch):
    no_room(monkeypatch, 60, 50)
    with pytest.raises(OutputError, match=rf"{tmp_path}: no room for the states of one batch"):
        groups(layers_of(path, spill=tmp_path), (0, 10), (0, 111))


def test_too_little_memory_names_the_smallest_that_works(path):
    with pytest.raises(UsageError, match="memory=1MiB` is too little") as caught:
        groups(layers_of(path, MIB), (1, 10), (300 * MIB, 10))
    named = re.search(r"smallest that works is (\S+)", caught.value.message)
    assert named
    smallest = parse_size(named[1])
    assert smallest > 300 * MIB
    assert groups(layers_of(path, smallest), (300 * MIB, 10))


def test_a_run_says_what_it_took_and_gives_everything_back(path, tmp_path):
    report, ids = RunReport(), torch.tensor([[5, 9, 12, 2]])
    layers, threads = layers_of(path, spill=tmp_path, report=report), threading.active_count()
    (group,) = groups(layers, (0, 1000))
    with open_model(path) as checkpoint:
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
            assert list(tmp_path.iterdir()) == [tmp_path / "model"], "the file has no name"
        expected = resident + times * (sum(bytes_of.values()) - resident)
        assert report.bytes_read == expected, "what is outside of layers is read once"
        assert report.readings == times
        assert report.spilled_bytes == 16 * MIB
        assert threading.active_count() == threads
