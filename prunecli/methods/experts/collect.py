"""Collect gate statistics of a checkpoint within given resources, going on from what an interrupted run left."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from prunecli.errors import UsageError
from prunecli.evaluation.decoding import DecodingOptions
from prunecli.evaluation.options import labels_for
from prunecli.methods.experts.batches import Pair
from prunecli.methods.experts.resume import PartialRun, forget
from prunecli.methods.experts.score import DEFAULT, CollectOptions, score
from prunecli.model.checkpoint import Checkpoint, open_model
from prunecli.model.cost import weight_bytes
from prunecli.modules.loading import choose_device, load_model
from prunecli.modules.machine import free_memory
from prunecli.modules.precision import (
    FREE_SHARE,
    choose_dtype,
    decoding,
    dtype_name,
    fitting_dtype,
    free_for_each,
    stored_as,
    type_line,
)
from prunecli.processes import ALONE, ProcessGroup, neighbours
from prunecli.progress import Progress, Say, silent, unsaid
from prunecli.results.gates import GateStatistics
from prunecli.results.header import header
from prunecli.running.layerwise.runner import Layerwise, Resources, RunReport
from prunecli.running.runner import InMemory, Runner
from prunecli.tensors.documents import refuse_unwritable, write_json
from prunecli.tensors.dtypes import parse_dtype
from prunecli.tensors.quantities import bytes_text
from prunecli.text.choice import TextChoice
from prunecli.text.parallel import ParallelText
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
    choice: TextChoice,
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
    """Run a mixture of experts over text and sum what its routers do (2212.09811, 4.1-4.2).

    Args:
        model: an open model, a directory or a name of the hub.
        choice: of parallel text.
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
        UsageError: a device or type that there is not; too little memory; layer by layer and a search.
        MemoryShortError: the model does not fit, and is to search.
        DataError: a language that the tokenizer lacks.
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
        text, pairs = choice.parallel(say)
        where = _own_device(choose_device(device))
        key = _key(checkpoint, text, pairs, options, dtype)
        partial_run = PartialRun(path, key, process_group, say)
    kind = _dtype(checkpoint, options, where, dtype, partial_run.dtype(), process_group, say)
    key["compute"] = str(kind)
    process_group.require_same({**key, "device": where.type, "memory": memory is None})
    if memory is None:
        memory = memory_for(checkpoint, options, where, kind, process_group, say)
    report = None if memory is None else RunReport()
    with partial_run.kept() as (state, save):
        runner: Runner
        if memory is None or report is None:
            runner = InMemory(load_model(checkpoint.path, device=where, dtype=kind), process_group)
        else:
            if options.mode != "forced":
                raise UsageError(
                    "--mode beam needs the whole model in memory: each step of a search goes through all layers",
                    "Use --mode forced, or leave --memory out on a machine that holds the model.",
                )
            resources = Resources(where, kind, memory, spill_directory)
            snapshots = partial_run.snapshots(state)
            runner = Layerwise(
                checkpoint, resources, report, process_group=process_group, snapshots=snapshots
            )
        tokenizer = load_tokenizer(checkpoint.path)
        statistics = score(
            runner, checkpoint, tokenizer, text, pairs, options, state=state, save=save, progress=progress
        )
    if report is not None:
        report = replace(report, bytes_read=int(*process_group.all_reduce([report.bytes_read])))
    statistics = replace(statistics, dtype=dtype_name(kind))
    if path is not None:
        with process_group.in_step():
            if process_group.is_main:
                document = {**header(statistics.format, [checkpoint], None), **statistics.to_json()}
                write_json(path, document, force=force)
        forget(path)
    return Collected(statistics, report)


def _key(
    checkpoint: Checkpoint, text: ParallelText, pairs: Sequence[Pair], options: CollectOptions, dtype: str
) -> dict[str, Any]:
    """Everything that the sums depend on, but the type that is chosen where none is asked for."""
    digest = hashlib.sha256()
    for language, lines in text.sentences.items():
        digest.update("\n".join((language, *lines, "")).encode())
    return {
        "model": checkpoint.fingerprint,
        "text": digest.hexdigest(),
        "pairs": [list(pair) for pair in pairs],
        "dtype": dtype,
        **asdict(options),
    }


def _own_device(device: torch.device) -> torch.device:
    """`cuda` by the number that this process has, of several; for threads too, whose `cuda` is the first."""
    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device())


def _dtype(
    checkpoint: Checkpoint,
    options: CollectOptions,
    device: torch.device,
    asked: str,
    earlier: str | None,
    process_group: ProcessGroup,
    say: Say,
) -> torch.dtype:
    """The type that gates are computed in: any size fits layer by layer, but a search needs the whole model.

    Args:
        asked: a type, or "auto".
        earlier: the type of the run that this one goes on from.
    """
    if asked == "auto":
        asked = process_group.broadcast(earlier) or asked
    opened = dict.fromkeys(labels_for([checkpoint.path]), checkpoint)
    if options.mode == "beam":
        return fitting_dtype(
            opened,
            device,
            asked,
            beside=decoding(DecodingOptions(options.beam, options.batch_tokens).load),
            by_layer="--mode forced --memory",
            process_group=process_group,
            say=say,
        )
    dtype, stored = choose_dtype(asked, checkpoint, device), stored_as(checkpoint)
    if asked == "auto" and dtype != stored:
        say(type_line(opened, stored, dtype, device) + ".")
    return dtype


def memory_for(
    checkpoint: Checkpoint,
    options: CollectOptions,
    device: torch.device,
    dtype: torch.dtype,
    process_group: ProcessGroup,
    say: Say,
) -> int | None:
    """Bytes that a run layer by layer may take; None where the whole model is to be held, by all processes."""
    whole = weight_bytes(checkpoint, parse_dtype(str(dtype)))
    if options.mode == "beam" or whole <= FREE_SHARE * free_for_each(device, process_group):
        return None
    free = min(process_group.all_gather(free_memory(device) // neighbours(device.type)))
    memory = int(AUTOMATIC_SHARE * free)
    say(
        f"The model takes {bytes_text(whole)}, {bytes_text(free)} are free: "
        f"it is run layer by layer, in {bytes_text(memory)} (see --memory)."
    )
    return memory
