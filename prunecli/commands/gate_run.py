"""How `collect-gates` runs a model: whole or layer by layer, going on from what an interrupted run left."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prunecli.commands import console
from prunecli.commands.memory_options import report_work
from prunecli.errors import PruneError
from prunecli.processes import neighbours, undisturbed

if TYPE_CHECKING:
    import torch

    from prunecli.methods.experts.layer_snapshots import Snapshots
    from prunecli.methods.experts.score import CollectOptions, State
    from prunecli.model.checkpoint import Checkpoint
    from prunecli.processes import ProcessGroup
    from prunecli.progress import Progress
    from prunecli.results.gates import GateStatistics
    from prunecli.running.layerwise.session import Resources
    from prunecli.text.parallel import ParallelText

AUTOMATIC_SHARE = 0.8
"""Part of the free memory that a run by layers takes where --memory is left out."""


@dataclass(frozen=True)
class GateRun:
    """What is to be counted, and where the result goes.

    Attributes:
        checkpoint: of the model.
        text: sentences of all languages.
        pairs: source and target of each entry.
        options: how statistics are collected.
        key: everything that the sums depend on.
        output: the result's file; what is done is kept beside it.
        progress: hears of it.
        process_group: of several processes; the first writes what is done.
    """

    checkpoint: Checkpoint
    text: ParallelText
    pairs: Sequence[tuple[str, str]]
    options: CollectOptions
    key: Mapping[str, Any]
    output: Path
    progress: Progress
    process_group: ProcessGroup

    def in_memory(self, device: torch.device, dtype: torch.dtype) -> GateStatistics:
        """Hold the whole model."""
        from prunecli.methods.experts.score import collect_gates
        from prunecli.modules.loading import load_model
        from prunecli.text.tokens import load_tokenizer

        with self._kept() as (state, save):
            model = load_model(self.checkpoint.path, device=device, dtype=dtype)
            return collect_gates(
                self.checkpoint,
                model,
                load_tokenizer(self.checkpoint.path),
                self.text,
                self.pairs,
                self.options,
                state=state,
                save=save,
                progress=self.progress,
                process_group=self.process_group,
            )

    def by_layer(self, means: Resources) -> GateStatistics:
        """Hold a layer at a time."""
        from prunecli.methods.experts.layer_major import collect_gates_by_layer
        from prunecli.methods.experts.layer_snapshots import Snapshots
        from prunecli.methods.experts.resume import layers_path
        from prunecli.running.layerwise.session import RunReport
        from prunecli.text.tokens import load_tokenizer

        work = RunReport()
        snapshots = Snapshots(
            layers_path(self.output, self.process_group), self.key, process_group=self.process_group
        )
        with self._kept() as (state, save):
            self._say_begun(snapshots, state)
            statistics = collect_gates_by_layer(
                self.checkpoint,
                load_tokenizer(self.checkpoint.path),
                self.text,
                self.pairs,
                self.options,
                means,
                state=state,
                save=save,
                snapshots=snapshots,
                progress=self.progress,
                work=work,
                process_group=self.process_group,
            )
        report_work(replace(work, bytes_read=int(sum(self.process_group.all_reduce([work.bytes_read])))))
        return statistics

    def _say_begun(self, snapshots: Snapshots, state: State) -> None:
        """Say what becomes of the layers that an interrupted run was through with."""
        from prunecli.methods.experts.layer_snapshots import belongs
        from prunecli.methods.experts.resume import layers_paths

        if (size := snapshots.group_size(state.batches)) is not None:
            console.note(f"Going on from {snapshots.path}: {size} batches are part of the way through.")
            return
        for path in layers_paths(self.output):
            if belongs(path, snapshots.key, state.batches):
                console.note(
                    f"{path} is of a run with another number of processes, or lacks what goes with it: "
                    "these batches begin again at the first layer."
                )
                return

    def forget(self) -> None:
        """Remove what was kept of an unfinished run."""
        from prunecli.methods.experts.resume import layers_paths, partial_path

        for path in (partial_path(self.output), *layers_paths(self.output)):
            path.unlink(missing_ok=True)

    @contextmanager
    def _kept(self) -> Iterator[tuple[State, Callable[[State], None]]]:
        """What an interrupted run left; if this one ends early, what it leaves is kept and said."""
        from prunecli.methods.experts.resume import Saver, layers_path, partial_path, read_state

        path = partial_path(self.output)
        saver = Saver(path, self.key)
        state = self.process_group.broadcast(read_state(path, self.key))
        if state.batches:
            console.note(f"Going on from {path}: {state.batches} batches are done.")
        if not self.process_group.is_main:
            yield state, lambda _state: None
            return
        try:
            yield state, saver
        except (KeyboardInterrupt, SystemExit, PruneError):
            with undisturbed():  # torchrun may end this process while it does what another's end makes it do
                saver.write()
                kept = [one for one in (path, layers_path(self.output, self.process_group)) if one.exists()]
                if kept:
                    console.note(f"Kept in {' and '.join(map(str, kept))}: the same command goes on from it.")
            raise


def own_device(device: torch.device) -> torch.device:
    """`cuda` by the number that this process has, of several; for threads too, whose `cuda` is the first."""
    import torch

    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device())


def dtype_of(
    checkpoint: Checkpoint,
    options: CollectOptions,
    device: torch.device,
    asked: str,
    earlier: str | None,
    process_group: ProcessGroup,
) -> torch.dtype:
    """The type that gates are computed in: any size fits layer by layer, but a search needs the whole model.

    Args:
        asked: a type, or "auto".
        earlier: the type of the run that this one goes on from.

    Raises:
        MemoryShortError: the model does not fit, and is to search.
    """
    from prunecli.evaluation.decoding import DecodingOptions
    from prunecli.evaluation.options import labels_for
    from prunecli.modules.precision import choose_dtype, decoding, fitting_dtype, stored_as, type_line

    if asked == "auto":
        asked = process_group.broadcast(earlier) or asked
    opened = dict.fromkeys(labels_for([checkpoint.path]), checkpoint)
    if options.mode == "beam":
        load = DecodingOptions(options.beam, options.batch_tokens).load
        return fitting_dtype(
            opened,
            device,
            asked,
            beside=decoding(load),
            by_layer="--mode forced --memory",
            process_group=process_group,
            say=console.note,
        )
    dtype, stored = choose_dtype(asked, checkpoint, device), stored_as(checkpoint)
    if asked == "auto" and dtype != stored:
        console.note(type_line(opened, stored, dtype, device) + ".")
    return dtype


def means_of(
    checkpoint: Checkpoint,
    options: CollectOptions,
    device: torch.device,
    dtype: torch.dtype,
    memory: int | None,
    spill_directory: Path | None,
    process_group: ProcessGroup,
) -> Resources | None:
    """What a run by layers may use; None where the whole model is to be held, by all processes."""
    from prunecli.methods.experts.layer_major import whole_model_bytes
    from prunecli.modules.machine import free_memory
    from prunecli.modules.precision import FREE_SHARE, free_for_each
    from prunecli.running.layerwise.session import Resources

    if memory is None:
        whole = whole_model_bytes(checkpoint, dtype)
        if options.mode == "beam" or whole <= FREE_SHARE * free_for_each(device, process_group):
            return None
        free = min(process_group.all_gather(free_memory(device) // neighbours(device.type)))
        said = f"takes {console.bytes_text(whole)}, {console.bytes_text(free)} are free"
        memory = int(AUTOMATIC_SHARE * free)
        console.note(
            f"The model {said}: it is run layer by layer, in {console.bytes_text(memory)} (see --memory)."
        )
    return Resources(device, dtype, memory, spill_directory)
