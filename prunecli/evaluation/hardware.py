"""The machine of a measurement: devices, threads; load time and peak memory of a model.

Load time and peak memory are measured in a separate process for each model: a process has one peak, which never falls.
"""

from __future__ import annotations

import json
import os
import pickle
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from prunecli.errors import PruneError
from prunecli.evaluation.workloads import Workload
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.cost import weight_bytes
from prunecli.modules.devices import devices_of
from prunecli.modules.loading import load_for_decoding, load_model
from prunecli.modules.machine import new_memory
from prunecli.progress import Say, unsaid
from prunecli.tensors.dtypes import parse_dtype
from prunecli.tensors.json_files import parsed
from prunecli.tensors.quantities import counted

SMALL = 1 << 22
"""Parameters up to which a model is computed in one thread: its products are too small to be shared.

Decoding with 2.4 million parameters, two threads on two cores: 0.99 of the speed of one thread; beside busy neighbours
0.06 of the speed. With 40 million 1.2 and 0.1: each operation waits for the thread that has no core.
"""
WATCH_S = 0.5
"""Seconds of the measurement of idle cores."""

MEMORY_SHARE = 0.8
"""Models are held at once if they fit in this share of the free memory."""


def fit_together(checkpoints: Sequence[Checkpoint], device: torch.device, dtype: torch.dtype) -> bool:
    """Whether all models, computed in `dtype`, fit in `MEMORY_SHARE` of the memory that is free."""

    needed = sum(weight_bytes(checkpoint, parse_dtype(str(dtype))) for checkpoint in checkpoints)
    return len(checkpoints) == 1 or needed <= MEMORY_SHARE * new_memory(device)


def model_sizes(model: Any) -> dict[str, int]:
    """Parameters, tied ones once, and their bytes in memory; those of a copy in int8 too."""
    parameters = list(model.parameters())
    copies = (module.weight for module in model.modules() if getattr(module, "is_copy", False))
    return {
        "parameters": sum(p.numel() for p in parameters) - sum(p.numel() for p in copies),
        "parameter_bytes": sum(p.numel() * p.element_size() for p in parameters),
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


def idle_threads(checkpoints: Iterable[Checkpoint], say: Say = unsaid) -> int:
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


def measure_cost(**task: Any) -> dict[str, Any]:
    """`run_task` in a new process.

    Returns:
        `load_s`: seconds of `load_model`, without imports; `resident_before` and `resident_peak`: peak resident bytes
        before loading (Python, torch and transformers), and of the process; `device_peak`: peak bytes that torch held
        on the GPUs, None on a CPU.

    Raises:
        PruneError: the process failed; with its last line.
    """
    environment = dict(os.environ)
    # The same prunecli, even if it is not installed.
    here = str(Path(__file__).resolve().parents[2])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [here, environment.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "prunecli.evaluation.hardware"]
    done = subprocess.run(
        command, input=pickle.dumps(task), env=environment, capture_output=True, check=False
    )
    if done.returncode == 0:
        cost: dict[str, Any] = parsed(done.stdout.splitlines()[-1])
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
    checkpoint: str, device: str, dtype: str, threads: int, work: Workload, beam: int, room: int = 0
) -> dict[str, Any]:
    """Load a model and run one batch in this process, whose peak counts from its start; see `measure_cost`.

    Args:
        work: the batch.
        room: bytes that the run holds besides the weights.
    """
    torch.set_num_threads(threads)
    before = peak_resident()
    start = time.perf_counter()
    load = load_for_decoding if work.decodes else load_model
    model = load(checkpoint, device=device, dtype=dtype, room=room)
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
