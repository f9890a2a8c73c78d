"""Speed of several checkpoints, run in turns: a machine's drift affects all of them alike. Load time and peak memory.

Every checkpoint decodes the same sentences to the same number of tokens (the end token is suppressed), so that a model
that stops early does not look fast. 5 runs, batch 1 and beam 5 are from 2309.01826, section 3; examples per second of a
model that does not generate are Table 4 of 1905.10650.

Load time and peak memory are measured in a separate process for each model: a process has one peak, which never falls.
"""

import gc
import json
import os
import pickle
import platform
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import chain, product
from pathlib import Path
from typing import Any

import torch

from prunecli.errors import PruneError
from prunecli.evaluation.options import LatencyOptions
from prunecli.evaluation.workloads import Phase, Workload, workload
from prunecli.model.checkpoint import Checkpoint, directory_of, open_model
from prunecli.model.cost import Load, weight_bytes
from prunecli.model.history import pruned_pairs
from prunecli.modules.devices import choose_devices, devices_of
from prunecli.modules.fitting import dtype_name, fitting_dtype
from prunecli.modules.machine import new_memory
from prunecli.processes import environment
from prunecli.progress import Progress, Say, silent, unsaid
from prunecli.results.document import Json
from prunecli.results.latency import Latency, Spread, Timing
from prunecli.tensors.dtypes import parse_dtype
from prunecli.tensors.json_files import parsed
from prunecli.tensors.quantities import counted
from prunecli.text.choice import TaskName, TextChoice, described, task_of_all
from prunecli.text.parallel import pair_name

BEAM = 5
"""Default beam of translation."""


Setting = tuple[int, int]
"""(batch size, beam)."""
Seconds = dict[tuple[Setting, Phase], dict[str, list[float]]]
"""Setting and phase -> label -> seconds of each timed run."""


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

    Translation takes sentences of the first pair of `choice` that all checkpoints were pruned for.

    Args:
        checkpoints: label -> an open model, a directory or a name on the hub, the baseline first.
        say: called with each automatic choice and its reason.
        task: None: translation of parallel text, else the task of the models.

    Returns:
        latency.json; nothing is written.

    Raises:
        PruneError: a checkpoint, text or language that cannot be used.
    """
    options = options or LatencyOptions()
    directories = {label: directory_of(model, say) for label, model in checkpoints.items()}
    if task is None:
        is_parallel = choice.data or choice.source_file
        task = "translation" if is_parallel else task_of_all([*directories.values()])
    choice.check_task(task, {"beams"} & options.changed)
    data = choice.read(task, say)
    if task == "translation":
        data = replace(data, pairs=pruned_pairs(list(directories.values()), data.pairs))
    if options.beams is None:
        beams = (BEAM,) if task == "translation" else (1,)
        options = options.updated(beams=beams)
    opened = {label: open_model(path) for label, path in directories.items()}
    beam, largest = max(options.beams or (1,)), max(options.batch_sizes)
    # A batch is full at every size, so that its speed is that of the size.
    count = -(-options.sentences // largest) * largest
    with threads(options.threads or idle_threads(opened.values(), say)):
        work = {
            label: workload(checkpoint, data, count, options.new_tokens)
            for label, checkpoint in opened.items()
        }
        gc.collect()
        longest = max(one.longest for one in work.values())
        load = Load(largest, beam, max(longest, options.new_tokens))
        # One type for all models: speeds in two types cannot be compared.
        dtype = fitting_dtype(
            opened,
            choose_devices(options.device),
            options.dtype,
            load=load,
            only_runs=True,
            say=say,
        )
        options = options.updated(dtype=dtype_name(dtype))
        costs: dict[str, Json] = {label: {} for label in opened}
        if options.memory:
            with progress("loading each by itself", len(opened), "checkpoints") as advance:
                for label, checkpoint in opened.items():
                    costs[label] = measure_cost(
                        checkpoint=str(checkpoint.path),
                        device=options.device,
                        dtype=options.dtype,
                        threads=torch.get_num_threads(),
                        work=work[label].part(0, largest),
                        beam=beam,
                        load=load,
                    )
                    advance(1)
        seconds, sizes, devices, interleaved = _timed(opened, work, load, options, progress)
        first = next(iter(opened))
        results = [
            {
                "checkpoint": label,
                "dtype": options.dtype,
                **sizes[label],
                "checkpoint_bytes": checkpoint.total_bytes,
                "devices": devices[label] if len(devices[label]) > 1 else None,
                **costs[label],
                "timings": [
                    _timing(setting, phase, by_label[label], by_label[first], work[label])
                    for (setting, phase), by_label in seconds.items()
                ],
            }
            for label, checkpoint in opened.items()
        ]
        if data.task == "translation":
            about: Json = {"pair": pair_name(*data.pairs[0])}
        else:
            about = {"task": data.task, "data": described(data.text)}
        if data.context is not None:
            about["context"] = data.context
        if data.task in ("translation", "lm"):
            about["new_tokens"] = options.new_tokens
        return Latency.model_validate(
            {
                **Latency.header(opened.values()),
                **about,
                "sentences": len(work[first]),
                "runs": options.runs,
                "warm_up": options.warm_up,
                "device": ", ".join(dict.fromkeys(chain(*devices.values()))),
                "dtype": options.dtype,
                "threads": torch.get_num_threads(),
                "torch": str(torch.__version__),
                "interleaved": interleaved,
                "results": results,
            }
        )


def _timed(
    opened: Mapping[str, Checkpoint],
    workloads: Mapping[str, Workload],
    load: Load,
    options: LatencyOptions,
    progress: Progress,
) -> tuple[Seconds, dict[str, dict[str, int]], dict[str, list[str]], bool]:
    """Run the checkpoints in turns. All models are held if they fit in memory, else one at a time.

    Returns:
        The seconds of each run; label -> parameters and bytes of its model; label -> names of the devices of its model;
        whether all models were held, so that their runs alternated.
    """
    labels, dtype = list(opened), parse_dtype(options.dtype)
    devices = choose_devices(options.device)
    needed = sum(weight_bytes(checkpoint, dtype) for checkpoint in opened.values())
    side_by_side = len(labels) > 1 and needed <= MEMORY_SHARE * new_memory(devices.first)
    together = side_by_side or len(labels) == 1
    passes = range(options.warm_up + options.runs)
    order = list(product(product(options.batch_sizes, options.beams or ()), passes, labels))
    if not together:
        order.sort(key=lambda turn: labels.index(turn[2]))  # stable: each checkpoint has its runs in a row
    models, sizes, names = dict[str, Any](), dict[str, dict[str, int]](), dict[str, list[str]]()
    seconds: Seconds = {}
    with progress("timing", len(order), "runs") as advance:
        for setting, number, label in order:
            (batch_size, beam), work = setting, workloads[label]
            if label not in models:
                if not together:
                    models.clear()
                    gc.collect()
                where = (devices.alone, None) if side_by_side else (devices, load)
                models[label] = work.load(opened[label].path, options.dtype, *where)
                sizes[label] = model_sizes(models[label])
                names[label] = [device_name(device) for device in devices_of(models[label])]
            total: Any = Counter()
            for start in range(0, len(work), batch_size):
                total.update(work.part(start, start + batch_size).run(models[label], beam))
            if number >= options.warm_up:
                for phase, elapsed in total.items():
                    seconds.setdefault((setting, phase), {}).setdefault(label, []).append(elapsed)
            advance(1)
    return seconds, sizes, names, together


def _timing(
    setting: Setting, phase: Phase, seconds: Sequence[float], baseline: Sequence[float], work: Workload
) -> Timing:

    count, tokens = len(work), work.tokens[phase]
    fields: Json = {}
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
        # Run i against run i of the baseline: slow phases of the machine cancel out, except in the runs in which they
        # begin and end, where one ratio may be any number; hence the median.
        speedup=Spread.of([base / value for base, value in zip(baseline, seconds, strict=True)]),
    )


SMALL = 1 << 22
"""Parameters up to which a model is computed in one thread: its products are too small to be shared.

Decoding with 2.4 million parameters, two threads on two cores: 0.99 of the speed of one thread; beside busy neighbours
0.06 of the speed. With 40 million 1.2 and 0.1: each operation waits for the thread that has no core.
"""
WATCH_S = 0.5
"""Seconds of the measurement of idle cores."""

MEMORY_SHARE = 0.8
"""Models are held at once if they fit in this share of the free memory."""


def model_sizes(model: Any) -> dict[str, int]:
    """Parameters, tied ones once, and their bytes in memory; those of a copy in int8 too."""
    parameters = list(model.parameters())
    copies = (module.weight for module in model.modules() if getattr(module, "is_copy", False))
    return {
        "parameters": sum(p.numel() for p in parameters) - sum(p.numel() for p in copies),
        "parameter_bytes": sum(p.nbytes for p in parameters),
    }


def device_name(device: Any) -> str:
    """Name of a device with its hardware: `cpu (AMD EPYC 7B13)`, `cuda:0 (NVIDIA H100)`."""
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    name = platform.machine()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        found = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
        name = next(found, "") or name
    return f"{device} ({name})"


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Compute on the CPU in `count` threads within the block."""

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def threads_for(checkpoints: Iterable[Checkpoint]) -> int:
    """Number of CPU threads by the models' sizes alone: one if all are small, else torch's choice."""

    is_large = any(checkpoint.total_parameters > SMALL for checkpoint in checkpoints)
    return torch.get_num_threads() if is_large else 1


def idle_threads(checkpoints: Iterable[Checkpoint], say: Say) -> int:
    """`threads_for` the models, and no more than there are idle cores.

    Args:
        say: called if there are fewer idle cores than threads.
    """
    import psutil

    wanted = idle = threads_for(checkpoints)
    if wanted > 1:
        busy = psutil.cpu_percent(WATCH_S, percpu=True)
        mine = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(len(busy))
        # The time in which nothing used a core counts as a fraction of this core.
        idle = max(1, min(wanted, round(sum(1 - busy[core] / 100 for core in mine))))
    if idle < wanted:
        say(
            f"Other work keeps the CPU busy: {counted(idle, 'thread')} instead of {wanted} "
            "(`threads` takes another number)."
        )
    return idle


def measure_cost(**task: Any) -> Json:
    """`run_task` in a new process.

    Returns:
        `load_s`: seconds of `load_model`, without imports; `resident_before` and `resident_peak`: peak resident bytes
        before loading (Python, torch and transformers), and of the process; `device_peak`: peak bytes that torch held
        on the GPUs, None on a CPU.

    Raises:
        PruneError: the process failed; with its last line.
    """
    done = subprocess.run(
        [sys.executable, "-m", "prunecli.evaluation.latency"],
        input=pickle.dumps(task),
        env=environment(),
        capture_output=True,
        check=False,
    )
    if done.returncode == 0:
        cost: Json = parsed(done.stdout.splitlines()[-1])
        return cost
    remedy = "Leave this measurement out with `memory=False`."
    if done.returncode == -signal.SIGKILL:
        remedy = (
            "The machine most likely ran out of memory: try `dtype`, a smaller model, or a smaller batch."
        )
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    reason = lines[-1] if lines else f"its process ended with status {done.returncode}"
    if done.returncode < 0:
        reason = f"its process was ended by {signal.Signals(-done.returncode).name}"
    raise PruneError(f"{task['checkpoint']}: could not be measured: {reason}", remedy)


def peak_resident() -> int:
    """Peak resident bytes of this process so far."""
    with suppress(OSError, IndexError):
        # ru_maxrss would do, but on Linux a new process inherits it from the one that started it.
        status = Path("/proc/self/status").read_text(encoding="ascii")
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def run_task(
    checkpoint: str,
    device: str,
    dtype: str,
    threads: int,
    work: Workload,
    beam: int,
    load: Load | None = None,
) -> Json:
    """Load a model and run one batch in this process, whose peak counts from its start; see `measure_cost`.

    Args:
        work: the batch.
        load: what the run decodes.
    """
    torch.set_num_threads(threads)
    before = peak_resident()
    start = time.perf_counter()
    model = work.load(checkpoint, dtype, device, load)
    cards = [device for device in devices_of(model) if device.type == "cuda"]
    for card in cards:
        torch.cuda.synchronize(card)
    load_s = time.perf_counter() - start
    work.run(model, beam)
    device_peak = sum(int(torch.cuda.max_memory_allocated(card)) for card in cards) if cards else None
    return {
        "load_s": load_s,
        "resident_before": before,
        "resident_peak": peak_resident(),
        "device_peak": device_peak,
    }


def main() -> None:
    """Run `run_task` with the pickled arguments on stdin, and print its cost as JSON."""
    try:
        cost = run_task(**pickle.load(sys.stdin.buffer))
    except PruneError as error:
        raise SystemExit(error.message) from None
    sys.stdout.write(f"\n{json.dumps(cost)}\n")


if __name__ == "__main__":
    main()
