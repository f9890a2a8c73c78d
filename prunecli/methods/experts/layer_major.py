"""Gate statistics of a model that does not fit in memory: the whole text goes through one layer after another.

Batches, and the order in which their sums are added, are those of `score`: the statistics are the same to the last bit.
Several processes share the batches and go through the layers in step, each reading the weights for itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from prunecli.checkpoint.declared import count
from prunecli.checkpoint.dtypes import parse_dtype
from prunecli.checkpoint.layout import sparse_layers
from prunecli.checkpoint.reader import Checkpoint
from prunecli.data.parallel import ParallelText
from prunecli.errors import UsageError
from prunecli.methods.experts.batches import Pair, batches_of
from prunecli.methods.experts.fit import weight_bytes
from prunecli.methods.experts.layer_groups import Group, Room
from prunecli.methods.experts.layer_passes import Passes, steps
from prunecli.methods.experts.layer_snapshots import Snapshots
from prunecli.methods.experts.score import (
    CollectOptions,
    State,
    check_languages,
    recording,
    statistics_of,
)
from prunecli.methods.experts.statistics import GateStatistics
from prunecli.modules.layerwise.budget import Demand, Shape
from prunecli.modules.layerwise.machine import (
    available_memory,
    disk_room,
    keep_below,
    map_large_blocks,
    resident_now,
    spill_directory,
)
from prunecli.modules.layerwise.parts import Skeleton, fill_resident, make_skeleton
from prunecli.modules.layerwise.reading import Reader
from prunecli.modules.layerwise.running import LayerMajor
from prunecli.modules.layerwise.states import States
from prunecli.processes import ALONE, Place, neighbours
from prunecli.progress import Progress, silent

MARGIN = 32 << 20
"""Bytes below `--memory` less a batch's activations from which freed memory is given back to the system."""


@dataclass(frozen=True)
class Means:
    """What a run may use.

    Attributes:
        device: to compute on.
        dtype: to compute in.
        memory: bytes, of the whole process on a CPU, of the device else; of several processes, for each.
        spill_directory: for the states that find no room in memory; None: the system's folder for temporary files.
    """

    device: torch.device
    dtype: torch.dtype
    memory: int
    spill_directory: Path | None = None


@dataclass
class Work:
    """What a run has done so far, for a report.

    Attributes:
        bytes_read: of weights.
        seconds: since its beginning.
        readings: times that the weights were gone through.
        spilled_bytes: the most that lay in the file at a time.
    """

    bytes_read: int = 0
    seconds: float = 0.0
    readings: int = 0
    spilled_bytes: int = 0


def collect_gates_by_layer(
    checkpoint: Checkpoint,
    tokenizer: Any,
    text: ParallelText,
    pairs: Sequence[Pair],
    options: CollectOptions,
    means: Means,
    *,
    state: State | None = None,
    save: Callable[[State], None] = lambda _state: None,
    snapshots: Snapshots | None = None,
    progress: Progress = silent,
    work: Work | None = None,
    place: Place = ALONE,
) -> GateStatistics:
    """As `score.collect_gates`, in forced mode, with the weights read as they are needed.

    As many batches as find room go through the layers together: each reading of the encoder serves all their sources,
    each reading of the decoder all their pairs.

    Args:
        state: of an interrupted run with the same arguments, in memory or not, to go on from.
        save: called with the state after every such group of batches.
        snapshots: where the states are kept after a layer, to go on from.
        work: is kept up to date.
        place: all of them call this, with the same state, and have the same result.

    Raises:
        UnsupportedModelError: the model has no experts.
        UsageError: beam search, or too little memory.
        DataError: a language that the tokenizer lacks.
        CheckpointError: weights that cannot be read.
        OutputError: no room for the states.
        PruneError: another process has ended.
    """
    if options.mode != "forced":
        raise UsageError(
            "--mode beam needs the whole model in memory: each step of a search goes through all layers",
            "Use --mode forced, or leave --memory out on a machine that holds the model.",
        )
    sparse_layers(checkpoint)
    check_languages(tokenizer, pairs)
    state, work = state or State(), work or Work()
    if means.device.type == "cpu":
        map_large_blocks()
    skeleton = make_skeleton(checkpoint, means.device, means.dtype)
    room = room_for(checkpoint, skeleton, means, place)
    run = _Run(checkpoint, skeleton, tokenizer, means, progress, work, room, place)
    batches = batches_of(skeleton.model, tokenizer, text, pairs, options.batch_tokens)
    # A group that was begun is gone on with as it was cut then, whatever the memory is now.
    begun = snapshots.group_size(state.batches) if snapshots else None
    for group in run.room.groups(islice(batches, state.batches, None), begun):
        state = run.through(group, state, snapshots)
        save(state)
    return statistics_of(checkpoint, options, state, pairs)


@dataclass
class _Run:
    """One run: what stays the same from group to group."""

    checkpoint: Checkpoint
    skeleton: Skeleton
    tokenizer: Any
    means: Means
    progress: Progress
    work: Work
    room: Room
    place: Place
    filled: bool = False

    def through(self, group: Group, state: State, snapshots: Snapshots | None) -> State:
        """All layers with one group; returns the state after it."""
        start = time.monotonic()
        if not self.filled:
            fill_resident(self.skeleton, self.checkpoint)
            self.work.bytes_read += sum(
                self.checkpoint.info(place.name).nbytes for place in self.skeleton.resident
            )
            self.filled = True
        memory = min(self.room.in_memory(group.plan), 3 * group.states + (1 << 20))
        model, layers = self.skeleton.model, sparse_layers(self.checkpoint)
        mine = self.place.share(group.batches)
        total = steps(self.skeleton.stages, mine)
        with (
            torch.inference_mode(),
            recording(model, layers) as recorder,
            self.progress("collecting gates, layer by layer", total, "batches x layers") as advance,
            States(memory, self.means.spill_directory) as states,
            Reader(
                self.checkpoint, group.plan.buffers, self.skeleton.widest_bytes, self.means.device
            ) as reader,
        ):
            passes = Passes(
                LayerMajor(self.skeleton, reader, states, self._make_room(group)),
                self.skeleton,
                states,
                recorder,
                int(self.tokenizer.pad_token_id),
                advance,
                self.place,
            )
            try:
                sums = passes.run(mine, state, len(group.batches), snapshots)
            finally:
                self.work.bytes_read += reader.bytes_read
                self.work.spilled_bytes = max(self.work.spilled_bytes, states.spilled_bytes)
                self.work.readings += 1
                self.work.seconds += time.monotonic() - start
        return State(state.batches + len(group.batches), sums)

    def _make_room(self, group: Group) -> Callable[[], None]:
        if self.means.device.type != "cpu":
            return lambda: None
        activations = self.room.activations(group.batches)
        return partial(keep_below, self.means.memory - activations - MARGIN)


def room_for(checkpoint: Checkpoint, skeleton: Skeleton, means: Means, place: Place = ALONE) -> Room:
    """What the run may use, the least of what the processes find.

    Raises:
        OutputError: no such spill directory.
    """
    on_cpu = means.device.type == "cpu"
    with place.in_step():
        found = (
            resident_now() if on_cpu else 0,
            disk_room(means.spill_directory) // neighbours("cpu"),
            available_memory() // 2 // neighbours("cpu"),
            means.memory,
        )
    process, disk, host, memory = zip(*place.gathered(found), strict=True)
    return Room(
        memory=min(memory),
        states=None if on_cpu else min(host),
        disk=min(disk),
        directory=spill_directory(means.spill_directory),
        demand=Demand(max(process), skeleton.resident_bytes, skeleton.widest_bytes, 0),
        shape=shape_of(checkpoint, skeleton, means.dtype),
        processes=place.processes,
    )


def shape_of(checkpoint: Checkpoint, skeleton: Skeleton, dtype: torch.dtype) -> Shape:
    """The sizes that activations depend on."""
    family, config = checkpoint.require_architecture(), checkpoint.config
    experts = [stage.sparse.num_experts for stage in skeleton.stages if stage.sparse is not None]
    return Shape(
        d_model=int(skeleton.model.config.hidden_size),
        ffn_dim=max(count(family, config, stack.ffn.width) for stack in family.stacks),
        heads=max(count(family, config, stack.attentions[0].heads) for stack in family.stacks),
        experts=max(experts, default=0),
        top_k=int(family.top_k or 1),
        itemsize=dtype.itemsize,
    )


def whole_model_bytes(checkpoint: Checkpoint, dtype: torch.dtype) -> int:
    """Bytes of all weights, computed in `dtype`."""
    return weight_bytes(checkpoint, parse_dtype(str(dtype)))
