"""This machine: free memory of the host and of a GPU, and free space of a disk."""

import ctypes
import resource
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from prunecli.errors import OutputError

CGROUP = Path("/sys/fs/cgroup")
GROUP_FILES = (
    ("memory.max", "memory.current", "inactive_file "),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file "),
)
"""Of a control group, version 2 and 1: its limit, what it uses, and the part of memory.stat that is page cache."""

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4  # of malloc.h
OWN_CHOICE = {M_TRIM_THRESHOLD: 64 << 20, M_MMAP_THRESHOLD: 32 << 20, M_MMAP_MAX: 1 << 16}
"""What the C library comes to by itself once blocks of 32 MiB have been freed; told one of them, it no longer does."""

PLENTY, PLENTY_TIMES = 4 << 30, 8
"""Free memory is plenty from this sum on: so many bytes and so many times the weights."""

KEPT_SHARE = 8
"""What a process keeps of what it has freed is at most this part of the free memory."""

SPILL_SHARE = 0.9
"""Part of the disk's free room that states may take."""

CONTEXT_BYTES = 768 << 20
"""Of a GPU, beside all tensors: CUDA's context, kernels, what libraries hold: 740 MiB on an H200 with CUDA 13."""


def resident_now() -> int:
    """Resident bytes of this process."""
    import psutil

    return int(psutil.Process().memory_info().rss)


def available_memory() -> int:
    """Bytes of the host that a new load can have, in a container or a process that is limited too."""
    import psutil

    bounds = [process_room(), *map(container_room, control_groups())]
    available = int(psutil.virtual_memory().available)
    return min([available, *(bound for bound in bounds if bound is not None)])


def new_memory(device: torch.device) -> int:
    """Bytes that a model can have on `device` beside what this process holds there."""
    if device.type == "cuda":
        return _gpu_memory(device)
    _tell("malloc_trim", 0)
    return available_memory()


@contextmanager
def limited(device: torch.device, memory: int) -> Iterator[None]:
    """Inside, this process takes no more than `memory` bytes of a GPU, `CONTEXT_BYTES` of them beside its tensors.

    What torch keeps of tensors that are gone counts, and goes where there is no room else. On the host nothing is done.

    Raises:
        torch.OutOfMemoryError: within, where a tensor finds no room.
    """
    if device.type != "cuda":
        yield
        return
    number = torch.cuda.current_device() if device.index is None else device.index
    total = torch.cuda.mem_get_info(number)[1]
    share = min(1.0, max(0, memory - CONTEXT_BYTES) / total)
    torch.cuda.set_per_process_memory_fraction(share, number)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, number)


def free_memory(device: torch.device) -> int:
    """Bytes that a model can have on `device`; on the host, with what this process has already."""
    if device.type == "cuda":
        return _gpu_memory(device)
    return available_memory() + resident_now()


def _gpu_memory(device: torch.device) -> int:
    """Return the free bytes of a GPU, with those that torch keeps of freed tensors, such as a model before."""
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + kept


def control_groups(own: Path = Path("/proc/self/cgroup"), root: Path = CGROUP) -> list[Path]:
    """Folders of this process's control groups and of those around them, each of which may have a limit."""
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    folders = []
    for line in lines or ["0::/"]:
        _number, controllers, name = line.split(":", 2)
        if not controllers or "memory" in controllers.split(","):
            top = root / "memory" if controllers else root
            inner = top / name.removeprefix("/")
            folders += [
                folder for folder in (inner, *inner.parents) if folder == top or top in folder.parents
            ]
    return folders


def process_room() -> int | None:
    """Bytes that `ulimit -v` leaves this process; None where it sets no limit."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return None
    import psutil

    return max(0, limit - int(psutil.Process().memory_info().vms))


def container_room(group: Path) -> int | None:
    """Bytes that a control group leaves, its page cache counted as free; None where it sets no limit."""
    for limited, current, cache in GROUP_FILES:
        try:
            limit = int((group / limited).read_text(encoding="ascii"))  # "max": there is none
            used = int((group / current).read_text(encoding="ascii"))
            lines = (group / "memory.stat").read_text(encoding="ascii").splitlines()
            cached = next((int(line.split()[1]) for line in lines if line.startswith(cache)), 0)
        except (OSError, ValueError):
            continue
        return max(0, limit - used + cached)  # without a limit version 1 writes the largest number
    return None


def keep_freed_blocks(weights: int) -> None:
    """If memory is plenty, keep blocks of any size that this process frees, for the next ones (glibc).

    The C library gives back blocks of more than 32 MiB, and each that takes their place is cleared anew, page by page:
    beam search over a large vocabulary makes five of them a step. Updates of a small NLLB-MoE on two cores take 0.8 of
    the time so, and 1.25 of the memory; decoding 32 sentences in int8 0.66 and 1.05.

    Args:
        weights: bytes of the model that runs.
    """
    free = available_memory()
    if free >= PLENTY + PLENTY_TIMES * weights:
        kept = max(free // KEPT_SHARE, OWN_CHOICE[M_TRIM_THRESHOLD])
        _tell("mallopt", M_TRIM_THRESHOLD, min(kept, 2**31 - 1))
        _tell("mallopt", M_MMAP_MAX, 0)


def give_back() -> None:
    """Give back to the system what this process has freed and kept; from here on it keeps what glibc would."""
    for what, value in OWN_CHOICE.items():
        _tell("mallopt", what, value)
    _tell("malloc_trim", 0)


def _tell(function: str, *values: int) -> None:
    """Call a function of the C library, where it has it."""
    call = getattr(ctypes.CDLL(None), function, None)
    if call is not None:
        call(*values)


def disk_room(directory: Path | None) -> int:
    """Bytes of states that a file in `directory` (None: the folder for temporary files) may hold.

    Raises:
        OutputError: no such directory.
    """
    directory = spill_directory(directory)
    try:
        return int(shutil.disk_usage(directory).free * SPILL_SHARE)
    except OSError as error:
        raise OutputError(
            f"{directory}: cannot hold the batches' states ({error.strerror})",
            "Name a `spill_directory` that exists and can be written to.",
        ) from error


def spill_directory(given: Path | None) -> Path:
    """`given`, or the folder for temporary files."""
    return Path(tempfile.gettempdir()) if given is None else given
