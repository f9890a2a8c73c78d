"""Speed of several checkpoints, run in turns so that a machine's drift hits all of them alike.

Every checkpoint decodes the same sentences to the same number of tokens (end-of-sentence is held back), so
that a model that stops early does not look fast. 5 runs, batch 1 and beam 5 are from 2309.01826, section 3;
examples per second of a model that does not generate are Table 4 of 1905.10650. What a task times is a `Workload`.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prunecli.evaluation.hardware import MemoryTask, idle_threads, measure_cost, threads
from prunecli.evaluation.timing import LatencyOptions, Setting, Turns, measure_seconds
from prunecli.evaluation.workload import Phase, Workload
from prunecli.evaluation.workloads import workload
from prunecli.model.checkpoint import Checkpoint, directory_of, open_model
from prunecli.model.cost import Load
from prunecli.model.history import pruned_pairs
from prunecli.progress import Progress, Say, silent, unsaid
from prunecli.text.choice import Dataset, TextChoice, described
from prunecli.text.parallel import pair_name
from prunecli.text.tasks import TaskName, task_of, task_of_all

if TYPE_CHECKING:
    from prunecli.results.latency import Latency, Timing

BEAM = 5
"""Of translation, where none is asked for."""


def bench_latency(
    checkpoints: Mapping[str, Checkpoint | Path | str],
    choice: TextChoice,
    options: LatencyOptions | None = None,
    progress: Progress = silent,
    say: Say = unsaid,
    *,
    task: TaskName | None = None,
) -> Latency:
    """Measure the speed of each checkpoint at `task`, on the first texts that `choice` names.

    Translation: sentences of the first pair of `choice` that all checkpoints were pruned for.

    Args:
        checkpoints: label -> an open model, a directory or a name of the hub, the baseline first.
        say: hears what is chosen by itself, and why.
        task: None: what the models are for where plain or labelled text is chosen, else translation.

    Returns:
        latency.json; nothing is written.

    Raises:
        PruneError: a checkpoint, text or language that cannot be used.
    """
    options = options or LatencyOptions()
    directories = {label: directory_of(model, say) for label, model in checkpoints.items()}
    if task is None:
        named = choice.files or choice.labelled is not None
        task = task_of_all(list(directories.values()), task_of) if named else "translation"
    choice.check(task, {"--beam": options.beams is not None})
    data = choice.read(task, say)
    if task == "translation":
        data = replace(data, pairs=pruned_pairs(list(directories.values()), data.pairs) or data.pairs)
    opened = {label: open_model(path) for label, path in directories.items()}
    with threads(options.threads or idle_threads(opened.values(), say)):
        workloads = {
            label: workload(checkpoint, data, options.count, options.new_tokens)
            for label, checkpoint in opened.items()
        }
        gc.collect()
        return _latency(opened, workloads, data, options, progress, say)


def _latency(
    opened: Mapping[str, Checkpoint],
    workloads: Mapping[str, Workload],
    data: Dataset,
    options: LatencyOptions,
    progress: Progress,
    say: Say,
) -> Latency:
    import torch

    from prunecli.modules.devices import choose_devices
    from prunecli.modules.fitting import COMPUTE, decoding, decoding_room, dtype_name, fitting_dtype
    from prunecli.results.header import header
    from prunecli.results.latency import Latency, Timed

    if options.beams is None:
        options = replace(options, beams=(BEAM,) if data.task == "translation" else (1,))
    beam, largest = max(options.beams or (1,)), max(options.batch_sizes)
    longest = max(work.longest for work in workloads.values())
    load = Load(largest, beam, max(longest, options.new_tokens))
    # One type for all models: speeds of two types say nothing of the models.
    dtype = fitting_dtype(
        opened, choose_devices(options.device), options.dtype, beside=decoding(load), only_runs=True, say=say
    )
    options = replace(options, dtype=dtype_name(dtype))
    rooms = {
        label: decoding_room(checkpoint, load, COMPUTE[options.dtype]) for label, checkpoint in opened.items()
    }
    costs = {}
    if options.memory:
        with progress("loading each by itself", len(opened), "checkpoints") as advance:
            for label, checkpoint in opened.items():
                task = MemoryTask(
                    checkpoint=str(checkpoint.path),
                    device=options.device,
                    dtype=options.dtype,
                    threads=torch.get_num_threads(),
                    work=workloads[label].part(0, largest),
                    beam=beam,
                    room=rooms[label],
                )
                costs[label] = measure_cost(task)
                advance(1)
    turns = Turns(opened, workloads, rooms, options)
    seconds = measure_seconds(turns, options, progress)
    first = next(iter(opened))
    results = [
        Timed(
            checkpoint=label,
            dtype=options.dtype,
            **turns.sizes[label],
            checkpoint_bytes=checkpoint.total_bytes,
            devices=turns.devices[label] if len(turns.devices[label]) > 1 else None,
            **(asdict(costs[label]) if label in costs else {}),
            timings=[
                _timing(setting, phase, by_label[label], by_label[first], workloads[label])
                for (setting, phase), by_label in seconds.items()
            ],
        )
        for label, checkpoint in opened.items()
    ]
    about: dict[str, Any] = {
        "task": data.task,
        "data": described(data.text),
    }
    if data.task == "translation":  # as ever
        about = {"pair": pair_name(*data.pairs[0])}
    if data.context is not None:
        about["context"] = data.context
    generated: dict[str, Any] = (
        {"new_tokens": options.new_tokens} if data.task in ("translation", "lm") else {}
    )
    return Latency(
        **header(Latency.FORMAT, list(opened.values()), None),
        **about,
        sentences=len(workloads[first]),
        **generated,
        runs=options.runs,
        warm_up=options.warm_up,
        device=", ".join(dict.fromkeys(chain(*turns.devices.values()))),
        dtype=options.dtype,
        threads=torch.get_num_threads(),
        torch=str(torch.__version__),
        interleaved=turns.together,
        results=results,
    )


def _timing(
    setting: Setting, phase: Phase, seconds: Sequence[float], baseline: Sequence[float], work: Workload
) -> Timing:
    from prunecli.results.latency import Spread, Timing

    count, tokens = len(work), work.tokens[phase]
    fields: dict[str, Any] = {}
    if phase is not None:
        fields["phase"] = phase
    elif work.decodes:
        fields["beam"] = setting[1]
    else:
        fields["examples_per_second"] = Spread.of([count / value for value in seconds])
    return Timing(
        batch_size=setting[0],
        **fields,
        seconds=[round(value, 6) for value in seconds],
        tokens_per_second=Spread.of([tokens / value for value in seconds]),
        seconds_per_sentence=Spread.of([value / count for value in seconds]),
        # Run i against run i of the baseline: what slows the machine for a while cancels out, but for the runs in which
        # it begins and ends, one ratio of which may be any number.
        speedup=Spread.of([base / value for base, value in zip(baseline, seconds, strict=True)]),
    )
