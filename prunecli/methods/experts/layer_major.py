"""Gate statistics of a model that does not fit in memory: the whole text goes through one layer after another.

Batches, and the order in which their sums are added, are those of `score`: the statistics are the same to the last bit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from prunecli.checkpoint.declared import count
from prunecli.checkpoint.dtypes import parse_dtype
from prunecli.checkpoint.layout import sparse_layers
from prunecli.checkpoint.reader import Checkpoint
from prunecli.data.parallel import ParallelText
from prunecli.errors import OutputError, UsageError
from prunecli.methods.experts.fit import weight_bytes
from prunecli.methods.experts.layer_passes import Passes, Snapshots, steps
from prunecli.methods.experts.score import (
    Batch,
    CollectOptions,
    Pair,
    State,
    batches_of,
    check_languages,
    recording,
    statistics_of,
)
from prunecli.methods.experts.statistics import GateStatistics
from prunecli.modules.layerwise.budget import (
    Demand,
    Plan,
    Shape,
    activation_bytes,
    plan_memory,
    size_text,
    state_bytes,
)
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
from prunecli.progress import Progress, silent

MARGIN = 32 << 20
"""Bytes below `--memory` less a batch's activations from which freed memory is given back to the system."""


@dataclass(frozen=True)
class Means:
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
) -> GateStatistics:
    """As `score.collect_gates`, in forced mode, with the weights read as they are needed.

    As many batches as find room go through the layers together: each reading of the encoder serves all their sources,
    each reading of the decoder all their pairs.

    Args:
        state: of an interrupted run with the same arguments, in memory or not, to go on from.
        save: called with the state after every such group of batches.
        snapshots: where the states are kept after a layer, to go on from.
        work: is kept up to date.

    Raises:
        UnsupportedModelError: the model has no experts.
        UsageError: beam search, or too little memory.
        DataError: a language that the tokenizer lacks.
        CheckpointError: weights that cannot be read.
        OutputError: no room for the states.
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
    run = _Run(checkpoint, skeleton, tokenizer, means, progress, work)
    batches = batches_of(skeleton.model, tokenizer, text, pairs, options.batch_tokens)
    left = (batch for number, batch in enumerate(batches) if number >= state.batches)
    # A group that was begun is gone on with as it was cut then, whatever the memory is now.
    begun = snapshots.group_size(state.batches) if snapshots else None
    for group in run.groups(left, begun):
        state = run.through(group, state, snapshots)
        save(state)
    return statistics_of(checkpoint, options, state, pairs)


@dataclass(frozen=True)
class _Group:
    """Batches that go through the layers together, and how memory is used meanwhile."""

    batches: list[Batch]
    plan: Plan
    states: int


@dataclass
class _Run:
    """One run: what stays the same from group to group."""

    checkpoint: Checkpoint
    skeleton: Skeleton
    tokenizer: Any
    means: Means
    progress: Progress
    work: Work
    shape: Shape = field(init=False)
    process: int = field(init=False)
    filled: bool = False

    def __post_init__(self) -> None:
        self.shape = shape_of(self.checkpoint, self.skeleton, self.means.dtype)
        self.process = resident_now() if self.means.device.type == "cpu" else 0

    def groups(self, batches: Iterable[Batch], first: int | None) -> Iterator[_Group]:
        """Cut the batches where memory and disk are full; the first group has `first` batches where that is given."""
        disk = disk_room(self.means.spill_directory)
        found: list[Batch] = []
        activations = encoder = decoder = 0
        plan: Plan | None = None
        for batch in batches:
            wider = max(activations, self._activations(batch))
            more_encoder, more_decoder = self._states(batch)
            wanted = plan_memory(self.means.memory, self._demand(wider))
            room = self._room(wanted) + disk
            full = max(encoder + more_encoder, decoder + more_decoder) > room
            if plan is not None and found and (full if first is None else len(found) == first):
                yield _Group(found, plan, max(encoder, decoder))
                first = None
                found, encoder, decoder, wider = [], 0, 0, self._activations(batch)
                wanted = plan_memory(self.means.memory, self._demand(wider))
            found.append(batch)
            activations, plan = wider, wanted
            encoder, decoder = encoder + more_encoder, decoder + more_decoder
            if len(found) == 1 and max(encoder, decoder) > self._room(plan) + disk:
                raise OutputError(
                    f"{spill_directory(self.means.spill_directory)}: no room for the states of one batch "
                    f"({size_text(max(encoder, decoder))})",
                    "Name a --spill-dir with more room, give more --memory, or a smaller --batch-tokens.",
                )
        if found and plan is not None:
            yield _Group(found, plan, max(encoder, decoder))

    def through(self, group: _Group, state: State, snapshots: Snapshots | None) -> State:
        """All layers with one group; returns the state after it."""
        start = time.monotonic()
        if not self.filled:
            fill_resident(self.skeleton, self.checkpoint)
            self.work.bytes_read += sum(
                self.checkpoint.info(place.name).nbytes for place in self.skeleton.resident
            )
            self.filled = True
        room = min(self._room(group.plan), 3 * group.states + (1 << 20))
        model, layers = self.skeleton.model, sparse_layers(self.checkpoint)
        total = steps(self.skeleton.stages, group.batches)
        with (
            torch.inference_mode(),
            recording(model, layers) as recorder,
            self.progress("collecting gates, layer by layer", total, "batches x layers") as advance,
            States(room, self.means.spill_directory) as states,
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
            )
            try:
                sums = passes.run(group.batches, state, snapshots)
            finally:
                self.work.bytes_read += reader.bytes_read
                self.work.spilled_bytes = max(self.work.spilled_bytes, states.spilled_bytes)
                self.work.readings += 1
                self.work.seconds += time.monotonic() - start
        return State(state.batches + len(group.batches), sums)

    def _demand(self, activations: int) -> Demand:
        return Demand(self.process, self.skeleton.resident_bytes, self.skeleton.widest_bytes, activations)

    def _room(self, plan: Plan) -> int:
        """Bytes of states that may be held in memory."""
        return plan.states if self.means.device.type == "cpu" else available_memory() // 2

    def _make_room(self, group: _Group) -> Callable[[], None]:
        if self.means.device.type != "cpu":
            return lambda: None
        activations = max(map(self._activations, group.batches))
        return partial(keep_below, self.means.memory - activations - MARGIN)

    def _activations(self, batch: Batch) -> int:
        sources = max(map(len, batch.sources))
        targets = [max(map(len, labels)) for labels in batch.targets.values()]
        return max(
            activation_bytes(self.shape, len(batch.sources), length, sources)
            for length in (sources, *targets)
        )

    def _states(self, batch: Batch) -> tuple[int, int]:
        """Bytes of states while the encoder runs, and while the decoder does (with the encoder's output)."""

        def held(rows: Sequence[Sequence[int]]) -> int:
            return state_bytes(self.shape, len(rows) * max(map(len, rows)), sum(map(len, rows)))

        output = len(batch.sources) * max(map(len, batch.sources)) * self.shape.d_model * self.shape.itemsize
        return held(batch.sources) + output, output + sum(map(held, batch.targets.values()))


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
