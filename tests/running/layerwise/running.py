"""Batches for any family, run in memory and layer by layer."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from prunecli.model.checkpoint import Checkpoint
from prunecli.modules.building import fill_resident, make_model
from prunecli.modules.stages import EmptyModel
from prunecli.running.layerwise import runner
from prunecli.running.layerwise.forward import LayerwiseRun
from prunecli.running.layerwise.reading import Reader
from prunecli.running.layerwise.states import StateStore
from prunecli.running.runner import Group, Pass, ignored

CPU = torch.device("cpu")
BATCHES = (
    torch.tensor([[5, 9, 12, 2], [7, 2, 1, 1]]),
    torch.tensor([[5, 9, 12, 6, 8, 2], [7, 2, 1, 1, 1, 1], [5, 5, 5, 2, 1, 1]]),
    torch.tensor([[11, 2]]),
)


class StopError(Exception):
    """Ends a run in the middle."""


def no_room(monkeypatch: pytest.MonkeyPatch, memory: int, disk: int = 1 << 40) -> None:
    """Have so much room for states, in memory and on the disk, whatever this process takes."""
    monkeypatch.setattr(runner.Demand, "plan", lambda *_: (2, memory))
    monkeypatch.setattr(runner, "disk_room", lambda _directory: disk)


def count_reads(checkpoint: Checkpoint) -> Counter[str]:
    """Name of a tensor -> bytes that are read of it from now on."""
    reads = Counter()
    real = checkpoint.read_range

    def counting(name: str, start: int, buffer: Any) -> memoryview:
        reads[name] += len(buffer)
        return real(name, start, buffer)

    checkpoint.read_range = counting  # type: ignore[method-assign]
    return reads


def inputs(model: Any, ids: torch.Tensor) -> dict[str, Any]:
    """Arguments of one forward pass, without a cache."""
    found = {"input_ids": ids, "attention_mask": (ids != 1).long()}
    if model.config.is_encoder_decoder:
        found["decoder_input_ids"] = ids.flip(1)
    if model.can_generate():
        found["use_cache"] = False
    return found


def skeleton_of(checkpoint: Checkpoint) -> EmptyModel:
    """A skeleton, its resident tensors in place; no parameter asks for gradients."""
    skeleton = make_model(checkpoint, CPU, torch.float32, output=True)
    skeleton.model.requires_grad_(False)
    fill_resident(skeleton, checkpoint)
    return skeleton


def passes(model: Any) -> list[Pass]:
    """A forward pass of each batch."""
    return [lambda ids=ids: model(**inputs(model, ids))[0] for ids in BATCHES]


@contextmanager
def started(
    skeleton: EmptyModel, checkpoint: Checkpoint, memory: int = 1 << 20, advance: Any = ignored
) -> Iterator[tuple[LayerwiseRun, StateStore]]:
    """A run of a skeleton, and what stores its states, of which nothing is left in the end."""
    with Reader(checkpoint, 2, skeleton.widest_bytes, CPU) as reader, StateStore(memory) as states:
        free = states.free_memory
        yield LayerwiseRun(skeleton, reader, states, advance, Group(0, ())), states
        assert states.free_memory == free
