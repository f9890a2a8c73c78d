"""Collect gate statistics of a checkpoint within given resources, going on from what an interrupted run left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from prunecli.errors import UsageError
from prunecli.evaluation.decoding import DecodingOptions
from prunecli.evaluation.options import labels_for
from prunecli.methods.experts.batches import DEFAULT, CollectOptions, Texts, Translation
from prunecli.methods.experts.options import of_language_model
from prunecli.methods.experts.score import PartialRun, layers_paths, score
from prunecli.model.checkpoint import Checkpoint, open_model
from prunecli.model.cost import Load, weight_bytes
from prunecli.modules.devices import Devices, choose_devices
from prunecli.modules.fitting import (
    FREE_SHARE,
    decoding,
    decoding_room,
    fitting_dtype,
    free_for_each,
    need_of,
    nothing,
    say_spread,
)
from prunecli.modules.loading import load_model
from prunecli.modules.machine import free_memory
from prunecli.modules.precision import choose_dtype, dtype_name, stored_as, type_line
from prunecli.processes import ALONE, ProcessGroup, neighbours
from prunecli.progress import Progress, Say, silent, unsaid
from prunecli.results.gates import GateStatistics
from prunecli.results.header import header
from prunecli.results.outputs import OutputSums, outputs_path
from prunecli.running.layerwise.runner import Layerwise, Resources, RunReport
from prunecli.running.runner import InMemory, Runner
from prunecli.tensors.documents import partial_path, refuse_unwritable, write_json
from prunecli.tensors.dtypes import parse_dtype
from prunecli.tensors.hub.names import origin
from prunecli.tensors.quantities import bytes_text
from prunecli.text.choice import TextChoice
from prunecli.text.corpus import Corpus
from prunecli.text.tokens import load_tokenizer

AUTOMATIC_SHARE = 0.8
"""Part of the free memory that a run layer by layer takes where it is not told how much."""


@dataclass(frozen=True)
class Collected:
    """What a run found.

    Attributes:
        statistics: of all pairs, and the type that gates were computed in.
        report: of a run layer by layer, bytes of all processes; None: the model was held whole.
    """

    statistics: GateStatistics
    report: RunReport | None


def collect_gates(
    model: Checkpoint | Path | str,
    choice: TextChoice | Sequence[Corpus],
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
        choice: of parallel text for a model that translates; for a language model, texts (see `read_corpora`).
        output: file that the statistics are written to; None: none. What is done is kept beside it while the run goes
            on, and the same call goes on from there.
        force: replace `output`.
        device, dtype: to compute on, and in.
        memory: bytes within which the model is run layer by layer; None: it is held whole where it fits.
        spill_directory: for the states of batches that find no room in it; None: the one for temporary files.
        process_group: all of its processes call this, and have the same result; the first writes.
        say: hears what is chosen, gone on from and kept.

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
        refusal = material.whole(checkpoint)
        if memory is not None and refusal is not None:
            raise refusal
        devices = choose_devices(device)
        where = devices.first
        if where.type == "cuda" and where.index is None:  # in other threads "cuda" is the first GPU
            where = torch.device("cuda", torch.cuda.current_device())
        devices = replace(devices, first=where)
        key = {"format": 2, "model": checkpoint.fingerprint, "dtype": dtype, **material.key}
        outputs = material.outputs if isinstance(material, Texts) else None
        # Sums of outputs are too large to be written now and then: such a run is not resumed.
        partial_run = PartialRun(None if outputs is not None else path, key, process_group, say)
    load = DecodingOptions(options.beam, options.batch_tokens).load if material.mode == "beam" else None
    state = partial_run.begun()
    if dtype == "auto":
        dtype = state.dtype or dtype
    kind = _dtype(checkpoint, refusal is None, load, devices, dtype, process_group, say)
    state = replace(state, dtype=str(kind))
    process_group.require_same(
        {**key, "compute": state.dtype, "device": where.type, "memory": memory is None}
    )
    if memory is None and refusal is None:
        memory = memory_for(checkpoint, devices, kind, process_group, say)
    report = None if memory is None else RunReport()
    if state.batches and path is not None:
        say(f"Going on from {partial_path(path)}: {state.batches} batches are done.")
    with partial_run.kept():
        runner: Runner
        if memory is None or report is None:
            room = 0 if load is None else decoding_room(checkpoint, load, kind)
            model_held = load_model(checkpoint.path, device=devices, dtype=kind, room=room)
            runner = InMemory(model_held, process_group)
        else:
            runner = Layerwise(
                checkpoint,
                Resources(where, kind, memory, spill_directory),
                report,
                process_group=process_group,
                snapshots=partial_run.snapshots(state),
            )
        statistics = score(
            runner,
            checkpoint,
            load_tokenizer(checkpoint.path),
            material,
            state=state,
            save=partial_run.save,
            progress=progress,
        )
    if report is not None:
        report = replace(report, bytes_read=int(*process_group.all_reduce([report.bytes_read])))
    whole_files = material.corpora[0].whole_files if isinstance(material, Texts) else None
    split = choice.split_read if isinstance(choice, TextChoice) else None
    statistics = replace(statistics, dtype=dtype_name(kind), split=split, whole_files=whole_files)
    sums = None
    if outputs is not None:
        sums = OutputSums.of(checkpoint.fingerprint, process_group.all_gather(outputs))
    if path is not None:
        with process_group.in_step():
            if process_group.is_main:
                document = {**header(statistics.format, [checkpoint], None), **statistics.to_json()}
                write_json(path, document, force=force)
                if sums is not None:
                    sums.write(outputs_path(path))
        for left in (partial_path(path), *layers_paths(path)):
            left.unlink(missing_ok=True)
    return Collected(statistics, report)


def material_of(
    checkpoint: Checkpoint, choice: TextChoice | Sequence[Corpus], options: CollectOptions, say: Say
) -> Translation | Texts:
    """The text, and how the model of `checkpoint` is run over it.

    Raises:
        UsageError: text of the other kind.
        DataError: text that cannot be used.
    """
    is_text = of_language_model(checkpoint)
    if isinstance(choice, TextChoice):
        if is_text:
            raise UsageError(
                f"{checkpoint.path}: a language model is measured on named texts",
                "Give --text NAME=FILE, once for each text.",
            )
        if options.mean_outputs:
            raise UsageError("--mean-outputs goes with language models.", "Leave it out.")
        return Translation(*choice.parallel(say), options)
    if not is_text:
        raise UsageError("--text goes with language models.", "Give parallel text: --data DIR.")
    return Texts(choice, options, outputs={} if options.mean_outputs else None)


def _dtype(
    checkpoint: Checkpoint,
    by_layer: bool,
    load: Load | None,
    devices: Devices,
    asked: str,
    process_group: ProcessGroup,
    say: Say,
) -> torch.dtype:
    """The type that gates are computed in.

    Args:
        by_layer: whether the model can run layer by layer, so that any type fits.
        load: what a search decodes. If None, nothing is searched.
        asked: a type, or "auto".
    """
    opened = dict.fromkeys(labels_for([checkpoint.path]), checkpoint)
    if not by_layer:
        return fitting_dtype(
            opened,
            devices,
            asked,
            beside=nothing if load is None else decoding(load),
            by_layer="" if load is None else "--mode forced --memory",
            process_group=process_group,
            say=say,
        )
    dtype, stored = choose_dtype(asked, checkpoint, devices.first), stored_as(checkpoint)
    if asked == "auto" and dtype != stored:
        say(type_line(opened, stored, dtype, devices.first) + ".")
    return dtype


def memory_for(
    checkpoint: Checkpoint, devices: Devices, dtype: torch.dtype, process_group: ProcessGroup, say: Say
) -> int | None:
    """Bytes for a run layer by layer. None if the whole model fits in the memory of each process."""
    device = devices.first
    whole = weight_bytes(checkpoint, parse_dtype(str(dtype)))
    if whole <= FREE_SHARE * free_for_each(device, process_group):
        return None
    if devices.others and (need := need_of(checkpoint, devices, dtype)).spread() is not None:
        say_spread(origin(checkpoint.path)["path"], need, say)
        return None
    free = min(process_group.all_gather(free_memory(device) // neighbours(device.type)))
    memory = int(AUTOMATIC_SHARE * free)
    say(
        f"The model takes {bytes_text(whole)}, {bytes_text(free)} are free: "
        f"it is run layer by layer, in {bytes_text(memory)} (see --memory)."
    )
    return memory
