"""Speed of several checkpoints, run in turns so that a machine's drift hits all of them alike.

Every checkpoint decodes the same sentences to the same number of tokens (end-of-sentence is held back), so
that a model that stops early does not look fast. The mean of 5 runs, batch 1 and beam 5 are from 2309.01826, section 3;
examples per second of a model that does not generate are Table 4 of 1905.10650. What a task times is a `Workload`.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prunecli.evaluation.timing import LatencyOptions, Setting, Turns, measure_seconds
from prunecli.evaluation.workload import Phase, Workload
from prunecli.evaluation.workloads import workload
from prunecli.model.checkpoint import Checkpoint, directory_of, open_model
from prunecli.model.cost import Load
from prunecli.model.history import pruned_pairs
from prunecli.progress import Progress, Say, silent, unsaid
from prunecli.text.choice import Dataset, TextChoice
from prunecli.text.columns import described
from prunecli.text.parallel import pair_name
from prunecli.text.tasks import TaskName, task_of, task_of_all

if TYPE_CHECKING:
    from prunecli.evaluation.memory import Cost
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
    with _threads(options.threads):
        workloads = {
            label: workload(checkpoint, data, options.count, options.new_tokens)
            for label, checkpoint in opened.items()
        }
        gc.collect()
        return _latency(opened, workloads, _described(data, options), options, progress, say)


def _described(data: Dataset, options: LatencyOptions) -> dict[str, Any]:
    """The fields of the file that say what is timed; those of translation as ever."""
    about: dict[str, Any] = {}
    if data.task == "translation":
        about["pair"] = pair_name(*data.pairs[0])
    else:
        about["task"] = data.task
        about["data"] = described(data.text)
    if data.context is not None:
        about["context"] = data.context
    if data.task in ("translation", "lm"):
        about["new_tokens"] = options.new_tokens
    return about


def _dtype(
    opened: Mapping[str, Checkpoint], workloads: Mapping[str, Workload], options: LatencyOptions, say: Say
) -> str:
    """The type of all models: speeds of two types say nothing of the models."""
    from prunecli.modules.devices import choose_devices
    from prunecli.modules.fitting import decoding, fitting_dtype
    from prunecli.modules.precision import dtype_name

    devices = choose_devices(options.device)
    beside = decoding(_load(workloads, options))
    return dtype_name(fitting_dtype(opened, devices, options.dtype, beside=beside, only_runs=True, say=say))


def _load(workloads: Mapping[str, Workload], options: LatencyOptions) -> Load:
    """The most that is decoded at a time."""
    longest = max(work.longest for work in workloads.values())
    return Load(max(options.batch_sizes), max(options.beams or (1,)), max(longest, options.new_tokens))


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(before if count is None else count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _costs(
    opened: Mapping[str, Checkpoint],
    workloads: Mapping[str, Workload],
    rooms: Mapping[str, int],
    options: LatencyOptions,
    progress: Progress,
) -> dict[str, Cost]:
    import torch

    from prunecli.evaluation.memory import MemoryTask, measure_cost

    costs = {}
    with progress("loading each by itself", len(opened), "checkpoints") as advance:
        for label, checkpoint in opened.items():
            work = workloads[label].part(0, max(options.batch_sizes))
            task = MemoryTask(
                checkpoint=str(checkpoint.path),
                device=options.device,
                dtype=options.dtype,
                threads=torch.get_num_threads(),
                kind=type(work).__name__,
                workload=asdict(work),
                beam=max(options.beams or (1,)),
                room=rooms[label],
            )
            costs[label] = measure_cost(task)
            advance(1)
    return costs


def _latency(
    opened: Mapping[str, Checkpoint],
    workloads: Mapping[str, Workload],
    about: Mapping[str, Any],
    options: LatencyOptions,
    progress: Progress,
    say: Say,
) -> Latency:
    import torch

    from prunecli.modules.fitting import decoding_room
    from prunecli.modules.precision import COMPUTE
    from prunecli.results.header import header
    from prunecli.results.latency import Latency, Timed

    if options.beams is None:
        options = replace(options, beams=(BEAM,) if "pair" in about else (1,))
    options = replace(options, dtype=_dtype(opened, workloads, options, say))
    load, dtype = _load(workloads, options), COMPUTE[options.dtype]
    rooms = {label: decoding_room(checkpoint, load, dtype) for label, checkpoint in opened.items()}
    costs = _costs(opened, workloads, rooms, options, progress) if options.memory else {}
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
    fields = dict(about)
    new_tokens = {"new_tokens": fields.pop("new_tokens")} if "new_tokens" in fields else {}
    return Latency(
        **header(Latency.FORMAT, list(opened.values()), None),
        **fields,
        sentences=len(workloads[first]),
        **new_tokens,
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
    from prunecli.results.latency import RobustSpread, Spread, Timing

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
        speedup=RobustSpread.of([base / value for base, value in zip(baseline, seconds, strict=True)]),
    )
