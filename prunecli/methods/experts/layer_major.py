"""Gate statistics of a model that does not fit in memory: the whole text goes through one layer after another.

Batches, and the order in which their sums are added, are those of `score`: the statistics are the same to the last bit.
Several processes share the batches and go through the layers in step, each reading the weights for itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import torch

from prunecli.errors import UsageError
from prunecli.methods.experts.batches import Pair, batches_of
from prunecli.methods.experts.layer_groups import Group, Room
from prunecli.methods.experts.layer_passes import Passes, steps
from prunecli.methods.experts.layer_snapshots import Snapshots
from prunecli.methods.experts.memory_fit import weight_bytes
from prunecli.methods.experts.score import (
    CollectOptions,
    State,
    check_languages,
    recording,
    statistics_of,
)
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.mixtures import SparseLayer
from prunecli.modules.machine import available_memory, disk_room, spill_directory
from prunecli.processes import ALONE, ProcessGroup, neighbours
from prunecli.progress import Progress, silent
from prunecli.results.gates import GateStatistics
from prunecli.running.layerwise.budget import Demand
from prunecli.running.layerwise.running import LayerwiseForward
from prunecli.running.layerwise.session import Resources, RunReport, Session
from prunecli.tensors.dtypes import parse_dtype
from prunecli.text.parallel import ParallelText


def collect_gates_by_layer(
    checkpoint: Checkpoint,
    tokenizer: Any,
    text: ParallelText,
    pairs: Sequence[Pair],
    options: CollectOptions,
    means: Resources,
    *,
    state: State | None = None,
    save: Callable[[State], None] = lambda _state: None,
    snapshots: Snapshots | None = None,
    progress: Progress = silent,
    work: RunReport | None = None,
    process_group: ProcessGroup = ALONE,
) -> GateStatistics:
    """As `score.collect_gates`, in forced mode, with the weights read as they are needed.

    As many batches as find room go through the layers together: each reading of the encoder serves all their sources,
    each reading of the decoder all their pairs.

    Args:
        state: of an interrupted run with the same arguments, in memory or not, to go on from.
        save: called with the state after every such group of batches.
        snapshots: where the states are kept after a layer, to go on from.
        work: is kept up to date.
        process_group: all of them call this, with the same state, and have the same result.

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
    checkpoint.require_mixtures()
    check_languages(tokenizer, pairs)
    state, work = state or State(), work or RunReport()
    session = Session(checkpoint, means, work)
    run = _Run(
        session, checkpoint.require_mixtures(), int(tokenizer.pad_token_id), means, progress, process_group
    )
    batches = batches_of(session.skeleton.model, tokenizer, text, pairs, options.batch_tokens)
    # A group that was begun is gone on with as it was cut then, whatever the memory is now.
    begun = snapshots.group_size(state.batches) if snapshots else None
    for group in run.room.groups(islice(batches, state.batches, None), begun):
        state = run.through(group, state, snapshots)
        save(state)
    return statistics_of(checkpoint, options, state, pairs)


class _Run:
    """One run: what stays the same from group to group."""

    def __init__(
        self,
        session: Session,
        layers: Sequence[SparseLayer],
        pad_id: int,
        means: Resources,
        progress: Progress,
        process_group: ProcessGroup,
    ) -> None:
        self.room = room_for(session, means, process_group)
        self._session, self._layers, self._pad_id = session, layers, pad_id
        self._progress, self._process_group = progress, process_group

    def through(self, group: Group, state: State, snapshots: Snapshots | None) -> State:
        """All layers with one group; returns the state after it."""
        skeleton = self._session.skeleton
        mine = self._process_group.share(group.batches)
        total = steps(skeleton.stages, mine)
        with (
            torch.inference_mode(),
            recording(skeleton.model, self._layers) as recorder,
            self._progress("collecting gates, layer by layer", total, "batches x layers") as advance,
            self._session.running(group, self.room.in_memory(group.plan)) as machinery,
        ):
            passes = Passes(
                LayerwiseForward(skeleton, machinery.reader, machinery.states, machinery.make_room),
                skeleton,
                machinery.states,
                recorder,
                self._pad_id,
                advance,
                self._process_group,
            )
            sums = passes.run(mine, state, len(group.batches), snapshots)
        return State(state.batches + len(group.batches), sums)


def room_for(session: Session, means: Resources, process_group: ProcessGroup = ALONE) -> Room:
    """What the run may use, the least of what the processes find.

    Raises:
        OutputError: no such spill directory.
    """
    with process_group.in_step():
        found = (
            session.process,
            disk_room(means.spill_directory) // neighbours("cpu"),
            available_memory() // 2 // neighbours("cpu"),
            means.memory,
        )
    process, disk, host, memory = zip(*process_group.all_gather(found), strict=True)
    skeleton = session.skeleton
    return Room(
        memory=min(memory),
        states=None if means.device.type == "cpu" else min(host),
        disk=min(disk),
        directory=spill_directory(means.spill_directory),
        demand=Demand(max(process), skeleton.resident_bytes, skeleton.widest_bytes, 0),
        shape=session.shape,
        processes=process_group.world_size,
    )


def whole_model_bytes(checkpoint: Checkpoint, dtype: torch.dtype) -> int:
    """Bytes of all weights, computed in `dtype`."""
    return weight_bytes(checkpoint, parse_dtype(str(dtype)))
