"""What a measurement ran on, and what a model takes there."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from prunecli.model.checkpoint import Checkpoint

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
