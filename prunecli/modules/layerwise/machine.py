"""What this machine has left: memory, of the host and of a GPU, and disk."""

from __future__ import annotations

import ctypes
import shutil
import tempfile
from pathlib import Path

import torch

from prunecli.errors import OutputError

CGROUP = Path("/sys/fs/cgroup")
M_MMAP_THRESHOLD = -3  # of malloc.h
MAPPED_BYTES = 1 << 20
"""From this size on, a block of memory is one of its own and goes back when it is freed."""

SPILL_SHARE = 0.9
"""Part of the disk's free room that states may take."""


def resident_now() -> int:
    """Resident bytes of this process."""
    import psutil

    return int(psutil.Process().memory_info().rss)


def available_memory() -> int:
    """Bytes of the host that a new load can have, in a container that is limited too."""
    import psutil

    available = int(psutil.virtual_memory().available)
    limited = container_room(CGROUP)
    return available if limited is None else min(available, limited)


def map_large_blocks() -> None:
    """Have every large block that this process frees go back to the system at once (glibc); for good.

    The C library keeps freed blocks of up to 32 MiB otherwise, of tensors of many sizes hundreds of MiB in all. What is
    had anew has to be cleared anew, page by page: a fifth of the time. Not so with huge pages, which torch asks for
    where the environment says THP_MEM_ALLOC_ENABLE=1 before its first tensor.
    """
    _tell("mallopt", M_MMAP_THRESHOLD, MAPPED_BYTES)


def keep_below(limit: int) -> None:
    """Where this process has more than `limit` resident bytes, give back what it has freed in small blocks (glibc)."""
    if resident_now() > limit:
        _tell("malloc_trim", 0)


def _tell(function: str, *values: int) -> None:
    """Call a function of the C library, where it has it."""
    found = getattr(ctypes.CDLL(None), function, None)
    if found is not None:
        found(*values)


def container_room(group: Path) -> int | None:
    """Bytes that a control group (version 2) leaves, its page cache counted as free; None where it sets no limit."""
    try:
        limit = (group / "memory.max").read_text(encoding="ascii").strip()
        used = int((group / "memory.current").read_text(encoding="ascii"))
        lines = (group / "memory.stat").read_text(encoding="ascii").splitlines()
        cached = next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)
        return None if limit == "max" else max(0, int(limit) - used + cached)
    except (OSError, ValueError):
        return None


def free_memory(device: torch.device) -> int:
    """Bytes that a model can have on `device`; on the host, with what this process has already."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return available_memory() + resident_now()


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
            "Name a --spill-dir that exists and can be written to.",
        ) from error


def spill_directory(given: Path | None) -> Path:
    """`given`, or the folder for temporary files."""
    return Path(tempfile.gettempdir()) if given is None else given
