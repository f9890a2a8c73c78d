"""What a measurement ran on, and what a model takes there."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prunecli.progress import Say, unsaid
from prunecli.tensors.quantities import counted

if TYPE_CHECKING:
    import torch

    from prunecli.model.checkpoint import Checkpoint

SMALL = 1 << 22
"""Parameters up to which a model is computed in one thread: its products are too small to be shared.

Decoding with 2.4 million parameters, two threads on two cores: 0.99 of the speed of one thread; beside busy neighbours
0.06 of the speed. With 40 million 1.2 and 0.1: each operation waits for the thread that has no core.
"""
STAT = Path("/proc/stat")
WATCH_S = 0.5
"""Seconds for which the cores are watched."""

MEMORY_SHARE = 0.8
"""Models are held at once if they fit in this share of the free memory."""


def fit_together(checkpoints: Sequence[Checkpoint], device: torch.device, dtype: torch.dtype) -> bool:
    """Whether all models, computed in `dtype`, fit in `MEMORY_SHARE` of the memory that is free."""
    from prunecli.model.cost import weight_bytes
    from prunecli.modules.machine import new_memory
    from prunecli.tensors.dtypes import parse_dtype

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
    """`cpu (AMD EPYC 7B13)`, `cuda:0 (NVIDIA H100)`."""
    if device.type == "cuda":
        import torch

        return f"{device} ({torch.cuda.get_device_name(device)})"
    return f"{device} ({_cpu_name() or platform.machine()})"


def device_names(model: Any) -> list[str]:
    """`device_name` of each that holds the model."""
    from prunecli.modules.devices import devices_of

    return [device_name(device) for device in devices_of(model)]


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "")


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Compute on the CPU in `count` threads within the block."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def threads_for(checkpoints: Iterable[Checkpoint]) -> int:
    """Number of CPU threads by the models' sizes alone: one if all are small, else torch's choice."""
    import torch

    is_large = any(checkpoint.total_parameters > SMALL for checkpoint in checkpoints)
    return torch.get_num_threads() if is_large else 1


def idle_threads(checkpoints: Iterable[Checkpoint], say: Say = unsaid) -> int:
    """`threads_for` the models, and no more than there are idle cores.

    Args:
        say: called if there are fewer idle cores than threads.
    """
    wanted = threads_for(checkpoints)
    idle = wanted if wanted == 1 else max(1, min(wanted, _idle_cores()))
    if idle < wanted:
        say(
            f"Other work keeps the CPU busy: {counted(idle, 'thread')} instead of {wanted} "
            "(--threads takes another number)."
        )
    return idle


def _idle_cores() -> int:
    """Number of cores' worth of time that nothing used for `WATCH_S`, of the cores of this process; all if unknown."""
    before, start = _idle_ticks(), time.monotonic()
    time.sleep(WATCH_S)
    ticks = (time.monotonic() - start) * os.sysconf("SC_CLK_TCK")
    shares = [(after - earlier) / ticks for after, earlier in zip(_idle_ticks(), before, strict=True)]
    return round(sum(shares)) if shares else os.cpu_count() or 1


def _idle_ticks() -> list[int]:
    """Ticks for which each core of this process was idle since the start of the machine; empty if not on Linux."""
    try:
        lines = STAT.read_text(encoding="ascii").splitlines()
    except OSError:
        return []
    mine = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    rows = (line.split() for line in lines)
    return [int(row[4]) + int(row[5]) for row in rows if row and row[0] in mine]  # idle, waiting for a disk
