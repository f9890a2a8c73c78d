"""What one checkpoint costs by itself, measured in a process of its own: load time and peak memory.

Several models in one process cannot be told apart, and a peak never goes down again.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from prunecli.errors import PruneError
from prunecli.evaluation.workload import Workload
from prunecli.tensors.json_files import read_json


@dataclass(frozen=True)
class MemoryTask:
    """What the process does: load, then run one batch.

    Attributes:
        work: the batch.
        room: bytes that the run holds beside the weights.
    """

    checkpoint: str
    device: str
    dtype: str
    threads: int
    work: Workload
    beam: int
    room: int = 0


@dataclass(frozen=True)
class Cost:
    """What it took.

    Attributes:
        load_s: seconds of `load_model`, imports not counted.
        resident_before: peak resident bytes before loading: Python, torch and transformers.
        resident_peak: peak resident bytes in all.
        device_peak: peak bytes that torch held on the GPUs; None on a CPU.
    """

    load_s: float
    resident_before: int
    resident_peak: int
    device_peak: int | None


def measure_cost(task: MemoryTask) -> Cost:
    """Run `task` in a new process.

    Raises:
        PruneError: the process failed; with its last line.
    """
    with tempfile.TemporaryDirectory(prefix="prunecli-") as folder:
        result = Path(folder) / "cost.json"
        environment = dict(os.environ)
        # The same prunecli, also where it is not installed.
        here = str(Path(__file__).resolve().parents[2])
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [here, environment.get("PYTHONPATH")]))
        command = [sys.executable, "-m", "prunecli.evaluation.memory", str(result)]
        done = subprocess.run(
            command,
            input=pickle.dumps(task),
            env=environment,
            capture_output=True,
            check=False,
        )
        if done.returncode != 0 or not result.is_file():
            remedy = "Leave this measurement out with --no-memory."
            if done.returncode == -signal.SIGKILL:
                remedy = "The machine most likely ran out of memory: try --dtype, a smaller model, or a smaller batch."
            raise PruneError(f"{task.checkpoint}: could not be measured: {_reason(done)}", remedy)
        return Cost(**read_json(result))


def _reason(done: subprocess.CompletedProcess[bytes]) -> str:
    if done.returncode < 0:
        return f"its process was ended by {signal.Signals(-done.returncode).name}"
    lines = [line for line in done.stderr.decode(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else f"its process ended with status {done.returncode}"


def peak_resident() -> int:
    """Peak resident bytes of this process so far."""
    try:
        # ru_maxrss would do, but on Linux a new process inherits it from the one that started it.
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def run_task(task: MemoryTask) -> Cost:
    """Load and run in this process, whose peak counts from its start."""
    import torch

    from prunecli.modules.devices import devices_of
    from prunecli.modules.loading import load_for_decoding, load_model

    torch.set_num_threads(task.threads)
    before = peak_resident()
    start = time.perf_counter()
    load = load_for_decoding if task.work.decodes else load_model
    model = load(task.checkpoint, device=task.device, dtype=task.dtype, room=task.room)
    cards = [device for device in devices_of(model) if device.type == "cuda"]
    for card in cards:
        torch.cuda.synchronize(card)
    load_s = time.perf_counter() - start
    task.work.run(model, task.beam)
    device_peak = sum(int(torch.cuda.max_memory_allocated(card)) for card in cards) if cards else None
    return Cost(load_s, before, peak_resident(), device_peak)


def main(arguments: Sequence[str]) -> None:
    """Run the task that stdin holds pickled, and write its `Cost` as JSON into the file that is named."""
    try:
        cost = run_task(pickle.load(sys.stdin.buffer))
    except PruneError as error:
        raise SystemExit(error.message) from None
    Path(arguments[0]).write_text(json.dumps(asdict(cost)), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
