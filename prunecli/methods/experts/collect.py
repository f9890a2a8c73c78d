"""Collect gate statistics of a mixture of experts (2212.09811, 4.1-4.2; 2510.13999, eq. 9).

Text becomes batches of forward passes, which observers see (`batches`), and `score` adds up what they saw. Every real
token that a sparse layer routes is counted: no padding, no beams of finished sentences. Sums are added in the order of
the batches: whether the model is in memory or runs layer by layer, how many processes share the batches, and how often
a run was interrupted changes no bit. An unfinished run keeps its sums in hidden files beside its output, and the same
call resumes it.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import Tensor

from prunecli.architectures.records import Side
from prunecli.errors import PruneError, UsageError
from prunecli.evaluation.decoding import DecodingOptions
from prunecli.evaluation.options import labels_for
from prunecli.methods.experts.batches import DEFAULT, Batch, LayerSums, Texts, Translation
from prunecli.methods.experts.options import of_language_model
from prunecli.methods.scoring import CollectOptions
from prunecli.model.checkpoint import Checkpoint, open_model
from prunecli.modules.building import refused_by_layer
from prunecli.modules.devices import Devices, choose_devices
from prunecli.modules.fitting import dtype_name, fitting_dtype, need_of, say_spread
from prunecli.modules.machine import free_memory
from prunecli.processes import ALONE, ProcessGroup, neighbours, undisturbed
from prunecli.progress import Progress, Say, silent, unsaid
from prunecli.results.gates import Entry, GateModel, GateStatistics, GateSums, outputs_path, write_outputs
from prunecli.running.layerwise.runner import Run, Runner, RunReport, make_runner
from prunecli.running.layerwise.states import Snapshots, own_header
from prunecli.running.runner import Advance, Observer, ignored
from prunecli.tensors.hub.names import origin
from prunecli.tensors.json_files import lenient, read_json
from prunecli.tensors.quantities import bytes_text
from prunecli.tensors.transaction import digest, partial_path, refuse_unwritable, write_json
from prunecli.text.choice import TextChoice
from prunecli.text.plain import Corpus
from prunecli.text.tokens import load_tokenizer

AUTOMATIC_SHARE = 0.8
"""Part of the free memory that a run layer by layer takes if `memory` is not given."""


SAVE_EVERY_S = 20.0


@dataclass(frozen=True)
class Collected:
    """Result of a run.

    Attributes:
        statistics: statistics of all pairs.
        report: costs of a run layer by layer, with the bytes of all processes. None if the model was held whole.
    """

    statistics: GateStatistics
    report: RunReport | None


def collect_gates(
    model: Checkpoint | Path | str,
    choice: TextChoice | Translation | Sequence[Corpus],
    options: CollectOptions = DEFAULT,
    output: str | Path | None = None,
    *,
    force: bool = False,
    device: str = "auto",
    dtype: str = "auto",
    memory: int | None = None,
    spill_directory: Path | None = None,
    process_group: ProcessGroup = ALONE,
    progress: Progress = silent,
    say: Say = unsaid,
) -> Collected:
    """Run a mixture of experts over text and sum what its routers do (2212.09811, 4.1-4.2; 2510.13999, eq. 9).

    Args:
        model: an open model, a directory or a name of the hub.
        choice: parallel text for a model that translates, read or not; texts for a language model (see
            `read_corpora`).
        output: file that the statistics are written to, if any. An unfinished run keeps its sums beside the file, and
            the same call resumes it.
        force: replace `output`.
        device, dtype: device and type to compute with.
        memory: bytes within which the model is run layer by layer. If None, it is held whole if it fits.
        spill_directory: directory for the states of batches that do not fit in `memory`. If None, the one for
            temporary files.
        process_group: all of its processes call this function, and return the same result; the first one writes.
        say: called with lines about choices, resumed and kept files.

    Raises:
        UnsupportedModelError: the model has no experts.
        UsageError: a device or type that there is not; too little memory; layer by layer and a search; text of the
            other kind.
        MemoryShortError: the model does not fit, and is to search.
        DataError: a language that the tokenizer lacks, or a text without tokens.
        CheckpointError: weights that cannot be read.
        OutputError: `output` exists, or there is no room for the states.
        PruneError: another process has ended.
    """
    path = None if output is None else Path(output)
    with process_group.in_step():
        if path is not None and process_group.is_main:
            refuse_unwritable(path, force=force)
        checkpoint = model if isinstance(model, Checkpoint) else open_model(model)
        checkpoint.require_mixtures()  # a model without experts is refused before anything heavy is loaded
        checkpoint.refuse_constants()
        material = material_of(checkpoint, choice, options, say)
        # Why the whole model must be in memory.
        refusal = refused_by_layer(checkpoint) if material.mode == "text" else None
        if material.mode == "beam":
            refusal = UsageError(
                "`mode=beam` needs the whole model in memory: each step of a search goes through all layers",
                "Use `mode=forced`, or leave `memory` out on a machine that holds the model.",
            )
        if memory is not None and refusal is not None:
            raise refusal
        devices = choose_devices(device)
        where = devices.first
        if where.type == "cuda" and where.index is None:  # in other threads "cuda" is the first GPU
            where = torch.device("cuda", torch.cuda.current_device())
        devices = replace(devices, first=where)
        key = {"format": 3, "model": checkpoint.fingerprint, "dtype": dtype, **material.key}
        outputs = material.outputs if isinstance(material, Texts) else None
        # Sums of outputs are too large to be written now and then: such a run is not resumed.
        partial_run = PartialRun(None if outputs is not None else path, key, process_group, say)
    state = partial_run.begun()
    load = None
    if dtype == "auto":
        dtype = state.dtype or dtype
    if material.mode == "beam":
        load = DecodingOptions(options.beam, options.batch_tokens).load
    kind = fitting_dtype(
        dict.fromkeys(labels_for([checkpoint.path]), checkpoint),
        devices,
        dtype,
        load=load,
        memory=0 if refusal is None else None,  # any type fits layer by layer
        by_layer="--mode forced --memory" if material.mode == "beam" else "",
        process_group=process_group,
        say=say,
    )
    state = replace(state, dtype=str(kind))
    process_group.require_same(
        {**key, "compute": state.dtype, "device": where.type, "memory": memory is None}
    )
    if memory is None and refusal is None:
        memory = memory_for(checkpoint, devices, kind, process_group, say)
    if state.batches and path is not None:
        say(f"Resuming from {partial_path(path)}: {state.batches} batches are done.")
    with partial_run.kept():
        runner = make_runner(
            checkpoint,
            devices,
            kind,
            memory,
            spill_directory,
            load=load,
            output=False,
            process_group=process_group,
            snapshots=None if memory is None else partial_run.snapshots(state),
        )
        tokenizer = load_tokenizer(checkpoint.path)
        statistics = score(
            runner, checkpoint, tokenizer, material, state=state, save=partial_run.save, progress=progress
        )
    report = runner.report
    if report is not None:
        report = replace(report, bytes_read=int(*process_group.all_reduce([report.bytes_read])))
    split = choice.split_read if isinstance(choice, TextChoice) else None
    if isinstance(choice, Translation):
        split = choice.text.split
    statistics = statistics.model_copy(
        update={
            "dtype": dtype_name(kind),
            "whole_files": material.corpora[0].whole_files if isinstance(material, Texts) else None,
            "split": split,
        }
    )
    parts = None if outputs is None else process_group.all_gather(outputs)
    if path is not None:
        with process_group.in_step():
            if process_group.is_main:
                statistics.write(path, force=force)
                if parts is not None:
                    write_outputs(outputs_path(path), checkpoint.fingerprint, parts)
        for left in (partial_path(path), *layers_paths(path)):
            with suppress(OSError):  # the result is there
                left.unlink()
    return Collected(statistics, report)


def material_of(
    checkpoint: Checkpoint,
    choice: TextChoice | Translation | Sequence[Corpus],
    options: CollectOptions,
    say: Say,
) -> Translation | Texts:
    """The text, and how the model of `checkpoint` is run over it.

    Raises:
        UsageError: text of the other kind.
        DataError: text that cannot be used.
    """
    if isinstance(choice, Translation):
        return replace(choice, options=options)
    is_text = of_language_model(checkpoint)
    if isinstance(choice, TextChoice):
        if is_text:
            raise UsageError(
                f"{checkpoint.path}: a language model is measured on named texts",
                "Give `text=NAME=FILE`, once for each text.",
            )
        options.refuse(["mean_outputs"], "goes with language models.")
        return Translation(*choice.parallel(say), options)
    if not is_text:
        raise UsageError("`text` goes with language models.", "Give parallel text: `data=DIR`.")
    return Texts(choice, options, outputs={} if options.mean_outputs else None)


def memory_for(
    checkpoint: Checkpoint, devices: Devices, dtype: torch.dtype, process_group: ProcessGroup, say: Say
) -> int | None:
    """Bytes for a run layer by layer. None if the whole model fits in the memory of each process."""
    device, need = devices.first, need_of(checkpoint, devices, dtype, process_group=process_group)
    if need.fits():
        say_spread(origin(checkpoint.path)["path"], need, say)
        return None
    free = min(process_group.all_gather(free_memory(device) // neighbours(device.type)))
    memory = int(AUTOMATIC_SHARE * free)
    say(
        f"The model takes {bytes_text(need.total)}, {bytes_text(free)} are free: "
        f"it is run layer by layer, in {bytes_text(memory)} (see `memory`)."
    )
    return memory


@dataclass(frozen=True)
class State:
    """Sums of the batches that are done.

    Attributes:
        batches: number of batches that are done; batches have a fixed order.
        sums: sums of each entry.
        dtype: type that the model is computed in. None before any batch.
    """

    batches: int = 0
    sums: dict[str, Entry] = field(default_factory=dict)
    dtype: str | None = None


STATE = TypeAdapter(State)


def score(
    runner: Runner,
    checkpoint: Checkpoint,
    tokenizer: Any,
    material: Translation | Texts,
    *,
    state: State = State(),
    save: Callable[[State], None] = ignored,
    progress: Progress = silent,
) -> GateStatistics:
    """Run a model over text and sum what its routers do.

    Experts are numbered as in the original model; those that were pruned before hold zeros.

    Args:
        runner: runs `checkpoint`; each of several processes has its own, calls this with the same state, and has the
            same result.
        state: state of an interrupted run with the same arguments, by any runner, to resume.
        save: called with the state after every group of batches.

    Raises:
        UnsupportedModelError: the model has no experts.
        DataError: text that the tokenizer cannot take.
        UsageError, CheckpointError, OutputError: as `runner` does.
        PruneError: another process has ended.
    """
    layers = checkpoint.require_routed()
    work = material.work(runner, layers, tokenizer)
    empty = GateSums.zeros(len(layers), layers[0].original_experts, work.observer.names)
    # Layer by layer, one progress line per group: the number of batches in a group is not known in advance.
    whole, each = (silent, progress) if runner.layerwise else (progress, silent)

    def size(batches: Iterable[Batch]) -> int:
        return sum(batch.size for batch in batches)

    with whole("collecting gates", work.total, work.unit) as advance, work.observer.watching(runner.model):
        advance(size(islice(work.batches, state.batches)))
        for group in runner.groups(
            work.batches, lambda layerwise, batch: batch.cost(layerwise), state.batches
        ):
            mine = runner.process_group.share(group.batches)
            passes = Counter(side for batch in mine for side, own in batch.passes.items() for _ in own)
            sums, encoded = defaultdict(lambda: empty, state.sums), list[Any]()
            with (
                each("collecting gates, layer by layer", runner.steps(passes), "batches x layers") as step,
                runner.running(group, step) as run,
            ):
                if run.restored is not None:
                    encoded = run.restored["encoded"]
                    sums |= STATE.validate_json(run.restored["sums"]).sums
                for side in group.batches[0].passes:
                    _run(run, side, mine, work.observer, runner.process_group, sums, encoded, advance)
            # One assignment: an interrupt finds the state before these batches or after them, never between.
            state = replace(state, batches=state.batches + len(group.batches), sums=dict(sums))
            save(state)
            advance(size(group.batches) - size(mine))
    entries = {
        name: reduce(GateSums.__add__, [state.sums[part] for part in parts])
        for name, parts in work.entries.items()
    }
    head = GateStatistics.header([checkpoint], None)
    if material.mode == "text":
        head["format"] = GateStatistics.TEXT_FORMAT
    return GateStatistics(
        **head,
        model=GateModel(
            fingerprint=checkpoint.fingerprint,
            model_type=checkpoint.resolved.family.model_type,
            routers=checkpoint.router_fingerprint,
        ),
        mode=material.mode,
        layers=tuple(layer.name for layer in layers),
        num_experts=layers[0].original_experts,
        top_k=layers[0].top_k,
        groups=layers[0].groups.count,
        entries=entries,
    )


def _run(
    run: Run,
    side: Side,
    batches: Sequence[Batch],
    observer: Observer,
    process_group: ProcessGroup,
    sums: dict[str, GateSums],
    encoded: list[Any],
    advance: Advance,
) -> None:
    """Run this process's batches of a group through one stack.

    Args:
        sums: sums by entry; those of the passes of all processes are added.
        encoded: kept output of the encoder for each batch; filled by the passes through the encoder.
    """
    passes = [
        (number, entry, forward)
        for number, batch in enumerate(batches)
        for entry, forward in batch.passes[side]
    ]

    def add(seen: list[LayerSums]) -> None:
        mine: list[dict[str, LayerSums]] = [{} for _ in batches]
        for (number, entry, _), layers in zip(passes, seen, strict=True):
            mine[number][entry] = layers
        for batch in process_group.gather_shares(mine):
            for entry, layers in batch.items():
                if layers or entry not in sums:
                    sums[entry] = sums[entry].plus(layers)

    def finish(place: int, output: Any) -> None:
        batch = batches[passes[place][0]]
        if output is None:
            advance(batch.size / len(batch.passes[side]))
        else:
            encoded.append(run.keep(output))

    def fetch(number: int) -> Tensor:
        return run.fetch(encoded[number])

    def keeping() -> dict[str, Any]:
        return {"encoded": encoded, "sums": STATE.dump_json(State(sums=sums)).decode()}

    run.forward(
        [partial(forward, partial(fetch, number)) for number, _, forward in passes],
        side=side,
        observer=observer,
        reduce=add,
        finish=finish,
        keeping=keeping,
    )


@dataclass
class PartialRun:
    """Hidden files that an unfinished run keeps beside its output.

    Attributes:
        output: result of the run. If None, nothing is kept.
        key: everything that the sums depend on; a run with another key is not resumed.
        process_group: the first process writes the sums, each process writes the states of its batches.
        say: called with a line about each file that is resumed or kept.
        last: the state to write if the run is interrupted.
        written: time of the last writing.
    """

    output: Path | None
    key: Mapping[str, Any]
    process_group: ProcessGroup = ALONE
    say: Say = unsaid
    last: State | None = None
    written: float = field(default_factory=time.monotonic)

    def begun(self) -> State:
        """The state of an interrupted run, the same for all processes; an empty state if there is none."""
        found = None if self.output is None else read_state(partial_path(self.output), self.key)
        return self.process_group.broadcast(found or State())

    @contextmanager
    def kept(self) -> Iterator[None]:
        """If the block is interrupted, write the last state and say which files are kept."""
        try:
            yield
        except (KeyboardInterrupt, SystemExit, PruneError):
            with undisturbed():  # torchrun may end this process while it does what another's end makes it do
                self.write()
                if self.output is not None and self.process_group.is_main:
                    files = (partial_path(self.output), self._layers(self.output))
                    if kept := [str(file) for file in files if file.exists()]:
                        self.say(f"Kept in {' and '.join(kept)}: the same command resumes from it.")
            raise

    def save(self, state: State) -> None:
        """Take a state, and write it if the last writing is long ago."""
        self.last = state
        if time.monotonic() - self.written >= SAVE_EVERY_S:
            self.write()

    def write(self) -> None:
        """Write the last state, if there is one."""
        if self.last is not None and self.output is not None and self.process_group.is_main:
            with undisturbed():
                write_state(partial_path(self.output), self.key, self.last)
            self.written = time.monotonic()

    def snapshots(self, state: State) -> Snapshots | None:
        """The file for the states of the batches in a run layer by layer; says what becomes of earlier files."""
        if self.output is None:
            return None
        path, key = self._layers(self.output), {**self.key, "compute": state.dtype}
        snapshots = Snapshots(path, key, process_group=self.process_group, say=self.say)
        if (size := snapshots.group_size(state.batches)) is not None:
            self.say(f"Resuming from {path}: {size} batches are part of the way through.")
        elif other := next(
            (other for other in layers_paths(self.output) if own_header(other, key, state.batches)), None
        ):
            self.say(
                f"{other} is of a run with another number of processes, or lacks what goes with it: "
                "these batches begin again at the first layer."
            )
        return snapshots

    def _layers(self, output: Path) -> Path:
        """File for the states of this process's batches."""
        group = self.process_group
        whose = "" if group.world_size == 1 else f".{group.rank}of{group.world_size}"
        return output.with_name(f".{output.name}.layers{whose}")


def layers_paths(output: Path) -> list[Path]:
    """Files that runs layer by layer left beside `output`, with any number of processes."""
    name = f".{output.name}.layers"
    return sorted(path for path in output.parent.iterdir() if path.name.startswith(name))


@lenient
def read_state(path: Path, key: Mapping[str, Any]) -> State | None:
    """The state that a run with the same `key` left in `path`. None if there is none, or a damaged one."""
    content = read_json(path)
    if content["key"] != key or content["sha256"] != digest(content["state"]):
        return None
    return STATE.validate_python(content["state"])


def write_state(path: Path, key: Mapping[str, Any], state: State) -> None:
    """Replace the file at once; floats are written so that they read back to the last bit."""
    content = STATE.dump_python(state, mode="json")
    # Without the digest, a run would silently resume from a damaged number.
    write_json(path, {"key": dict(key), "state": content, "sha256": digest(content)}, force=True)
