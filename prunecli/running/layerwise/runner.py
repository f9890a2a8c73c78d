"""Run a checkpoint layer by layer within a given memory: groups of batches that fit, and a report."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, TypeVar

import torch

from prunecli.architectures.records import Side
from prunecli.errors import OutputError
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.cost import Load
from prunecli.modules.building import fill_resident, make_model
from prunecli.modules.dequantised import as_run
from prunecli.modules.devices import Devices
from prunecli.modules.fitting import candidates
from prunecli.modules.loading import load_model
from prunecli.modules.machine import (
    CONTEXT_BYTES,
    available_memory,
    disk_room,
    limited,
    resident_now,
    spill_directory,
)
from prunecli.processes import ALONE, ProcessGroup, neighbours
from prunecli.running.layerwise.budget import Demand, shape_of
from prunecli.running.layerwise.forward import LayerwiseRun
from prunecli.running.layerwise.reading import Reader
from prunecli.running.layerwise.states import Snapshots, StateStore
from prunecli.running.runner import Advance, BatchCost, Group, InMemory, chunks, ignored
from prunecli.tensors.quantities import bytes_text, size_text

B = TypeVar("B")

ROOMY = 1 << 30
"""Bytes to spare that no weights are read ahead into, and no states of a GPU's batches are in."""

AHEAD = 1 << 30
"""Bytes to spare that weights may take beyond the next blocks, so that experts are read while attentions compute."""

MOST_AHEAD = 128
"""Most blocks that are read ahead; more small buffers take long to make, and none is waited for."""


@dataclass
class RunReport:
    """Bytes, time and readings of a run so far.

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

    def line(self, *, back: bool = False) -> str:
        """Sentence for the user; `back`: the run went back through the layers too."""
        rate = bytes_text(self.bytes_read / max(self.seconds, 1e-9))
        times = "once" if self.readings == 1 else f"in {self.readings} groups"
        spilled = f"; {bytes_text(self.spilled_bytes)} of states in a file" if self.spilled_bytes else ""
        return (
            f"Went through the layers{' and back' if back else ''} {times}: {bytes_text(self.bytes_read)} of weights "
            f"read, {rate} a second{spilled}."
        )


class Layerwise:
    """Runs a checkpoint whose layers' weights stay on disk.

    Args:
        checkpoint: of a declared family, or of one of which the experts alone are declared.
        device, dtype: device and type to compute with.
        memory: bytes that each process may use: of the whole process on a CPU, of the device else.
        directory: for the states that find no room in memory; None: the system's folder for temporary files.
        output: as of `make_model`.
        process_group: the processes that share the batches; each reads the weights for itself, in step with the others.
        snapshots: where the states of a group are kept after a layer, to go on from.

    Attributes:
        model: weights outside of its layers are there once a group runs.
        skeleton: the same, with its layers.
        shape: its sizes.
        has_position_bias: whether its layers hand a bias of the attention weights on.
        report: costs of all groups so far.

    Raises:
        UnsupportedModelError: its class says nothing.
        CheckpointError: a tensor is missing, unexpected or misshapen.
        OutputError: no such spill directory.
    """

    layerwise = True

    def __init__(
        self,
        checkpoint: Checkpoint,
        device: torch.device,
        dtype: torch.dtype,
        memory: int,
        directory: Path | None = None,
        *,
        process_group: ProcessGroup = ALONE,
        snapshots: Snapshots | None = None,
        output: bool = False,
    ) -> None:
        checkpoint = as_run(checkpoint, dtype)
        self.skeleton = make_model(checkpoint, device, dtype, output=output)
        self.model, self.device = self.skeleton.model, device
        self.shape = shape_of(checkpoint, self.skeleton, dtype)
        self.has_position_bias = any(
            attention.position_bias
            for stack in checkpoint.resolved.family.stacks
            for attention in stack.attentions
        )
        self.process_group = process_group
        self._checkpoint, self._snapshots = checkpoint, snapshots
        self._memory, self._directory = memory, directory
        self.report = RunReport()
        self._on_cpu, self._filled = device.type == "cpu", False
        with process_group.in_step():
            mine = (
                resident_now() if self._on_cpu else CONTEXT_BYTES,  # before any weight is read
                disk_room(directory) // neighbours("cpu"),
                available_memory() // 2 // neighbours("cpu"),
                memory,
            )
        process, disk, host, least = zip(*process_group.all_gather(mine), strict=True)
        # Of the process that has least, so that all cut the same groups; on a CPU, the memory is for states too.
        self._least, self._disk = min(least), int(min(disk))
        self._host: int | None = None if self._on_cpu else min(host)
        self._demand = Demand(max(process), self.skeleton.resident_bytes, self.skeleton.widest_bytes)

    def steps(self, passes: Mapping[Side, int]) -> int:
        """Number of times that passes go through a layer, given the number of passes of each stack."""
        return sum(passes.get(stage.side, 0) for stage in self.skeleton.stages)

    def groups(
        self, batches: Iterable[B], cost: Callable[[Layerwise, B], BatchCost], start: int = 0
    ) -> Iterable[Group[B]]:
        """Groups of as many batches as fit. All groups of a sequence are made before the first runs.

        A group of an interrupted run that is resumed has the batches that it had then, whatever the memory is now.
        """
        begun = self._snapshots.group_size(start) if self._snapshots else None
        priced = ((batch, cost(self, batch)) for batch in batches)
        if not isinstance(batches, Sequence):
            return self._cut(priced, start, begun)
        known = list(priced)
        largest = max((taken.activations for _, taken in known), default=0)
        return list(self._cut(known, start, begun, largest))

    def _cut(
        self, batches: Iterable[tuple[B, BatchCost]], start: int, begun: int | None, largest: int = 0
    ) -> Iterator[Group[B]]:
        """End a group where memory and disk are full; the first group after `begun` batches, if not None.

        In a group each process has the same number of batches; only the last group may have fewer for some.
        """
        together, held = list[B](), BatchCost(largest)
        for more in chunks(batches, self.process_group.world_size):
            wider = _both(held, more)
            if together and (
                max(wider.states) > self._for_states(wider) if begun is None else len(together) == begun
            ):
                yield Group(start, together, held)
                start, together, begun = start + len(together), [], None
                wider = _both(BatchCost(largest), more)
            if not together and max(wider.states) > self._for_states(wider):
                raise OutputError(
                    f"{spill_directory(self._directory)}: no room for the states of one batch "
                    f"({size_text(max(wider.states))})",
                    "Name a `spill_directory` with more room, give more `memory`, or a smaller `batch_tokens`.",
                )
            together += [batch for batch, _ in more]
            held = wider
        if together:
            yield Group(start, together, held)

    def _for_states(self, cost: BatchCost) -> int:
        """Bytes of states that find room, in memory and on the disk, while batches of this cost run.

        Raises:
            UsageError: the memory is too small; the error names the smallest that works.
        """
        _, left = self._demand.plan(self._least, cost.activations)
        return (left if self._host is None else self._host) + self._disk

    @contextmanager
    def running(self, group: Group[B], advance: Advance = ignored) -> Iterator[LayerwiseRun]:
        """Within the block, the group runs; frees memory, file and threads after the block, whatever happens.

        Raises:
            CheckpointError: weights that cannot be read.
            OutputError: no room for the states.
        """
        start, report = time.monotonic(), self.report
        if not self._filled:
            fill_resident(self.skeleton, self._checkpoint)
            report.bytes_read += sum(
                self._checkpoint.stored_bytes(place.name) for place in self.skeleton.resident
            )
            self._filled = True
        buffers, left = self._demand.plan(self._least, group.cost.activations)
        wanted = 3 * max(group.cost.states, default=0) + (1 << 20)
        spare = left - wanted
        ahead = min(MOST_AHEAD, max(0, min(spare - ROOMY, AHEAD)) // self.skeleton.widest_bytes)
        memory, where = min(left if self._host is None else self._host, wanted), torch.device("cpu")
        if spare >= ROOMY and not self._on_cpu:  # all states find room on the GPU
            memory, where = wanted, self.device
        with (
            limited(self.device, self._memory),
            StateStore(memory, self._directory, where) as states,
            Reader(
                self._checkpoint,
                buffers + ahead,
                self.skeleton.widest_bytes,
                self.device,
            ) as reader,
        ):
            try:
                yield LayerwiseRun(self.skeleton, reader, states, advance, group, self._snapshots)
            finally:
                report.bytes_read += reader.bytes_read
                report.spilled_bytes = max(report.spilled_bytes, states.spilled_bytes)
                report.readings += 1
                report.seconds += time.monotonic() - start


Runner = InMemory | Layerwise
Run: TypeAlias = InMemory | LayerwiseRun
"""Runs batches through a model, and a group of batches on its way through it."""


def make_runner(
    checkpoint: Checkpoint,
    devices: Devices,
    dtype: torch.dtype | str,
    memory: int | None = None,
    spill_directory: Path | None = None,
    *,
    load: Load | None = None,
    output: bool = True,
    process_group: ProcessGroup = ALONE,
    snapshots: Snapshots | None = None,
) -> Runner:
    """Runs a checkpoint layer by layer within `memory`, or, if it is None, the whole model.

    Args:
        load: what the whole model decodes.
        output, process_group, snapshots: as of `Layerwise`.

    Raises:
        PruneError: a model that cannot be run so, or does not fit.
    """
    if memory is None:
        return InMemory(load_model(checkpoint.path, device=devices, dtype=dtype, load=load), process_group)
    if isinstance(dtype, str):
        dtype = candidates(dtype, [checkpoint], devices.first)[0]
    return Layerwise(
        checkpoint,
        devices.first,
        dtype,
        memory,
        spill_directory,
        process_group=process_group,
        snapshots=snapshots,
        output=output,
    )


def _both(held: BatchCost, more: Sequence[tuple[B, BatchCost]]) -> BatchCost:
    """Cost of batches that go together: those held, and for each process one more, the dearest of which counts."""
    added = [max(states) for states in zip(*(cost.states for _, cost in more), strict=True)]
    states = tuple(map(sum, zip(held.states or (0,) * len(added), added, strict=True)))
    return BatchCost(max(held.activations, *(cost.activations for _, cost in more)), states)
