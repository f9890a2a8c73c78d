"""Passes in several threads, each through all experts in their order, with no more blocks than there are buffers."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from prunecli.errors import CheckpointError
from prunecli.running.layerwise.experts import Assigned, run_experts

EXPERTS = 7


class Blocks:
    """A reader of numbers; the block of `damaged` cannot be read."""

    def __init__(self, wanted: list[int], buffers: int, damaged: int | None = None) -> None:
        self.room = threading.Semaphore(buffers)
        self.left, self.damaged = list(wanted), damaged
        self.held: list[int] = []

    def take(self) -> Any:
        assert self.room.acquire(timeout=10), "nobody gives a buffer back"
        number = self.left.pop(0)
        if number == self.damaged:
            raise CheckpointError("damaged")
        self.held.append(number)
        return SimpleNamespace(number=number)

    def give_back(self, loaded: Any) -> None:
        self.held.remove(loaded.number)
        self.room.release()


@pytest.fixture(autouse=True)
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def passes(draw: random.Random, count: int, shared_out: float) -> list[Assigned]:
    """With up to three rows for each expert."""
    found = []
    for _ in range(count):
        starts = [0]
        for _ in range(EXPERTS):
            starts.append(starts[-1] + draw.randrange(4))
        found.append(Assigned(starts=starts, shared_out=draw.random() < shared_out))
    return found


@pytest.mark.parametrize("buffers", [1, 3])
@pytest.mark.parametrize("shared_out", [0.0, 0.6, 1.0])
def test_each_pass_goes_through_its_experts_in_order(buffers: int, shared_out: float) -> None:
    draw = random.Random(buffers)
    sent = passes(draw, 5, shared_out)
    wanted = [number for number in range(EXPERTS) if any(one.goes_to(number) for one in sent)]
    reader = Blocks(wanted, buffers)
    seen: dict[int, list[int]] = {id(one): [] for one in sent}
    threads: dict[int, set[int]] = {id(one): set() for one in sent}

    def run(one: Assigned, expert: int, loaded: Any) -> None:
        assert loaded.number == expert
        assert expert in reader.held
        assert not torch.is_grad_enabled()
        time.sleep(random.random() * 0.002)
        seen[id(one)].append(expert)
        threads[id(one)].add(threading.get_ident())

    with torch.no_grad():
        run_experts(run, reader, wanted, sent)  # type: ignore[arg-type]
    assert not reader.held
    for one in sent:
        assert seen[id(one)] == [number for number in wanted if one.goes_to(number)]
        assert len(threads[id(one)]) <= 1
        assert one.shared_out or threads[id(one)] <= {threading.get_ident()}


@pytest.mark.parametrize("shared_out", [0.0, 1.0])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_failure_ends_all_threads(shared_out: float, error: type[BaseException]) -> None:
    sent = passes(random.Random(1), 6, shared_out)
    reader = Blocks(list(range(EXPERTS)), 2)
    at_work: Future[None] = Future()

    def run(one: Assigned, expert: int, _loaded: Any) -> None:
        assert not at_work.done()
        if one is sent[3] and expert >= 2:
            raise error
        time.sleep(0.002)

    with pytest.raises(error):
        run_experts(run, reader, range(EXPERTS), sent)  # type: ignore[arg-type]
    at_work.set_result(None)
    assert len(reader.left) >= EXPERTS - 5, "the others went on"


def test_what_cannot_be_read_is_said() -> None:
    sent = passes(random.Random(2), 4, 1.0)
    with pytest.raises(CheckpointError, match="damaged"):
        run_experts(lambda *_: None, Blocks(list(range(EXPERTS)), 2, damaged=3), range(EXPERTS), sent)  # type: ignore[arg-type]
