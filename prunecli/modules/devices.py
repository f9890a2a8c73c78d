"""The device that a model runs on: which one a name means, and what is said of one that cannot be used or is full."""

from __future__ import annotations

import torch

from prunecli.errors import UsageError
from prunecli.tensors.quantities import bytes_text

OLDEST_OF_CUDA_13 = (7, 5)
"""Cards of a lower compute capability have kernels in builds for CUDA 12.6 alone; torch 2.14 is the last of them."""

OLDER_WHEELS = 'pip install "torch<2.15" --index-url https://download.pytorch.org/whl/cu126'
NO_KERNELS = "no kernel image"

FULL = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
"""What torch says where a device has no more memory."""

FULL_HOST = ("can't allocate memory", "not enough memory")
"""The same of the host."""


def choose_device(name: str) -> torch.device:
    """The device of this name; `auto` is a GPU where there is one.

    A GPU is tried: the CPU never takes the place of one that torch finds and cannot use.

    Raises:
        UsageError: torch does not know it, the machine lacks it, or torch cannot use it.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
        return _tried(torch.device(name), "auto")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"--device {name}: no such device", "Try auto, cpu, cuda or cuda:1.") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"--device {name}: torch finds no GPU here", "Try --device cpu.")
    return _tried(device, name)


def found_device() -> torch.device:
    """A GPU where there is one that can be used, else the CPU: for what is said of a machine."""
    try:
        return choose_device("auto")
    except UsageError:
        return torch.device("cpu")


def _tried(device: torch.device, name: str) -> torch.device:
    try:
        torch.ones(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        if device.type == "cuda" and NO_KERNELS in str(error):
            raise _without_kernels(device, name) from None
        others = "auto, cpu, cuda or cuda:1" if name != "auto" else "cpu, or another GPU as cuda:1"
        reason = next(iter(str(error).splitlines()), type(error).__name__).rstrip(".")
        raise UsageError(f"--device {name}: torch cannot use it here ({reason})", f"Try {others}.") from None
    return device


def _without_kernels(device: torch.device, name: str) -> UsageError:
    capability = torch.cuda.get_device_capability(device)
    built = ", ".join(torch.cuda.get_arch_list())
    wheels = OLDER_WHEELS if capability < OLDEST_OF_CUDA_13 else "pip install --upgrade torch"
    return UsageError(
        f"--device {name}: torch {torch.__version__} has no kernels for {torch.cuda.get_device_name(device)} "
        f"(sm_{capability[0]}{capability[1]}; it has those of {built})",
        f"Install wheels that have them: {wheels}; or go on without the GPU: --device cpu.",
    )


def full_device(error: BaseException) -> str | None:
    """Where memory was short: `cuda:0 (31.74 GiB, 0.21 GiB free)`, "the host"; None if `error` says something else.

    torch raises an error of its own where its allocator finds no block, another where CUDA says so itself, and plain
    ones for cuBLAS, which wants a workspace, and for the host.
    """
    said = str(error)
    if not isinstance(error, RuntimeError):
        return None
    if any(words in said for words in FULL_HOST):
        return "the host"
    if isinstance(error, torch.OutOfMemoryError) or any(words in said for words in FULL):
        return _filling()
    return None


def _filling() -> str:
    """How full the current GPU is, where that can still be asked."""
    if not torch.cuda.is_available():
        return "the device"
    try:
        device = torch.cuda.current_device()
        free, total = torch.cuda.mem_get_info(device)
        here = torch.cuda.memory_reserved(device)
    except RuntimeError:  # an error of CUDA stays for the rest of the process
        return "the GPU"
    return f"cuda:{device} ({bytes_text(total)}, {bytes_text(here)} of it this process's, {bytes_text(free)} free)"
