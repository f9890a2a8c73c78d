"""Running a checkpoint layer by layer within a given memory: what fits, in which groups batches go, what it took."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from prunecli.errors import OutputError
from prunecli.model.checkpoint import Checkpoint
from prunecli.modules.machine import (
    available_memory,
    disk_room,
    keep_below,
    map_large_blocks,
    resident_now,
    spill_directory,
)
from prunecli.running.layerwise.budget import Demand, Plan, Shape, plan_memory, size_text
from prunecli.running.layerwise.parts import Skeleton, fill_resident, make_skeleton
from prunecli.running.layerwise.reading import Reader
from prunecli.running.layerwise.states import StateStore

MARGIN = 32 << 20
"""Bytes below the memory less a batch's activations from which freed memory is given back to the system."""

ROOMY = 1 << 30
"""Bytes to spare from which the C library may keep what is freed; to have it anew costs a tenth of the time."""


@dataclass(frozen=True)
class Resources:
    """What a run may use.

    Attributes:
        device: to compute on.
        dtype: to compute in.
        memory: bytes, of the whole process on a CPU, of the device else.
        spill_directory: for the states that find no room in memory; None: the system's folder for temporary files.
    """

    device: torch.device
    dtype: torch.dtype
    memory: int
    spill_directory: Path | None = None


@dataclass
class RunReport:
    """What a run has done so far, for a report.

    Attributes:
        bytes_read: of weights.
        seconds: since its beginning.
        readings: groups of batches that went through the layers.
        spilled_bytes: the most that lay in the file at a time.
    """

    bytes_read: int = 0
    seconds: float = 0.0
    readings: int = 0
    spilled_bytes: int = 0


@dataclass(frozen=True)
class BatchCost:
    """What a batch takes.

    Attributes:
        activations: bytes while it is computed.
        states: bytes that are kept of it meanwhile.
    """

    activations: int
    states: int


@dataclass(frozen=True)
class Held:
    """What batches take that go through the layers together.

    Attributes:
        plan: how memory is used.
        states: bytes that are kept of them at a time, at most.
        activations: bytes that the largest batch takes.
    """

    plan: Plan
    states: int
    activations: int


@dataclass(frozen=True)
class Group(Held):
    """Batches that go through the layers together.

    Attributes:
        numbers: of the batches.
    """

    numbers: tuple[int, ...]


@dataclass(frozen=True)
class Machinery:
    """What batches are run with.

    Attributes:
        reader: of the layers' weights.
        states: where batches are kept.
        make_room: to be called before memory is taken for activations.
    """

    reader: Reader
    states: StateStore
    make_room: Callable[[], None]


class Session:
    """A checkpoint whose layers stay on disk.

    Args:
        checkpoint: of a declared family.
        means: what may be used.
        work: is kept up to date.

    Attributes:
        skeleton: the model; weights outside of its layers are there once a group runs.
        shape: its sizes.
        has_position_bias: whether its layers hand a bias of the attention weights on.
        process: resident bytes before any weight is read; 0 on a GPU.

    Raises:
        UnsupportedModelError: the family is not declared.
        CheckpointError: a tensor is missing, unexpected or misshapen.
    """

    def __init__(self, checkpoint: Checkpoint, means: Resources, work: RunReport) -> None:
        on_cpu = means.device.type == "cpu"
        self.skeleton = make_skeleton(checkpoint, means.device, means.dtype)
        self.shape = shape_of(checkpoint, self.skeleton, means.dtype)
        self.has_position_bias = any(
            attention.position_bias
            for stack in checkpoint.require_architecture().stacks
            for attention in stack.attentions
        )
        self._checkpoint, self._means, self._work = checkpoint, means, work
        self.process = resident_now() if on_cpu else 0
        self._on_cpu, self._filled = on_cpu, False

    def groups(self, needs: Sequence[BatchCost]) -> list[Group]:
        """Cut batches, in their order, where memory and disk are full; nothing is read or computed.

        Raises:
            UsageError: too little memory; it names the smallest that works.
            OutputError: no room for what is kept of a single batch, or no such directory.
        """
        activations = max((need.activations for need in needs), default=0)
        resident, widest = self.skeleton.resident_bytes, self.skeleton.widest_bytes
        plan = plan_memory(self._means.memory, Demand(self.process, resident, widest, activations))
        room = self._room(plan) + disk_room(self._means.spill_directory)
        found: list[Group] = []
        numbers: list[int] = []
        states = 0
        for number, need in enumerate(needs):
            if need.states > room:
                raise OutputError(
                    f"{spill_directory(self._means.spill_directory)}: no room for the states of one batch "
                    f"({size_text(need.states)})",
                    "Name a --spill-dir with more room, give more --memory, or a smaller --batch-tokens.",
                )
            if numbers and states + need.states > room:
                found.append(Group(plan, states, activations, tuple(numbers)))
                numbers, states = [], 0
            numbers.append(number)
            states += need.states
        return [*found, Group(plan, states, activations, tuple(numbers))] if numbers else found

    @contextmanager
    def running(self, group: Held, room: int | None = None) -> Iterator[Machinery]:
        """Inside, the group is run; memory, file and thread are given back after it, whatever happens.

        Args:
            group: what it takes.
            room: bytes of states that may be held in memory; None: what the plan leaves.

        Raises:
            CheckpointError: weights that cannot be read.
            OutputError: no room for the states.
        """
        start, work = time.monotonic(), self._work
        if not self._filled:
            fill_resident(self.skeleton, self._checkpoint)
            work.bytes_read += sum(
                self._checkpoint.info(place.name).nbytes for place in self.skeleton.resident
            )
            self._filled = True
        wanted = 3 * group.states + (1 << 20)
        if self._on_cpu and group.plan.states < wanted + ROOMY:
            map_large_blocks()
        held = min(self._room(group.plan) if room is None else room, wanted)
        with (
            StateStore(held, self._means.spill_directory) as states,
            Reader(
                self._checkpoint, group.plan.buffers, self.skeleton.widest_bytes, self._means.device
            ) as reader,
        ):
            try:
                yield Machinery(reader, states, self._make_room(group))
            finally:
                work.bytes_read += reader.bytes_read
                work.spilled_bytes = max(work.spilled_bytes, states.spilled_bytes)
                work.readings += 1
                work.seconds += time.monotonic() - start

    def _room(self, plan: Plan) -> int:
        """Bytes of states that may be held in memory."""
        return plan.states if self._on_cpu else available_memory() // 2

    def _make_room(self, group: Held) -> Callable[[], None]:
        if not self._on_cpu:
            return lambda: None
        return partial(keep_below, self._means.memory - group.activations - MARGIN)


def shape_of(checkpoint: Checkpoint, skeleton: Skeleton, dtype: torch.dtype) -> Shape:
    """The sizes that activations depend on."""
    family, sizes = checkpoint.layout.family, checkpoint.layout.sizes
    # What is declared is pruned, which may be groups of heads that share keys and values.
    heads = [sizes.count(stack.attentions[0].heads) for stack in family.stacks]
    heads.append(int(skeleton.model.config.num_attention_heads))
    experts = [stage.sparse.num_experts for stage in skeleton.stages if stage.sparse is not None]
    return Shape(
        d_model=int(skeleton.model.config.hidden_size),
        ffn_dim=max(sizes.count(stack.ffn.width) for stack in family.stacks),
        heads=max(heads),
        experts=max(experts, default=0),
        top_k=int(family.top_k or 1),
        itemsize=dtype.itemsize,
    )
