"""Training on a GPU that gives the same numbers again, as it does on a CPU.

Many kernels of a GPU add in an order that is another one each time; torch has others, somewhat slower, for most of
them. They are asked for, and where a model needs one that torch lacks, that is found by one batch beforehand, and said.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from prunecli.processes import ProcessGroup
from prunecli.progress import Say

WORKSPACE, FIXED = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
"""What has cuBLAS add in one order; it looks at it at its first product. 8 buffers of 4 MiB on each GPU."""

NONE_THERE = "does not have a deterministic implementation"
"""What torch says where it lacks one."""


@contextmanager
def repeatable(
    device: torch.device, probe: Callable[[], None] | None, process_group: ProcessGroup, say: Say
) -> Iterator[None]:
    """Within the block a GPU computes in one order, where torch can; on a CPU it always does.

    Args:
        probe: a batch forwards and back, which leaves nothing behind but random numbers drawn; training seeds anew.
            None: it cannot be asked, and what torch lacks is let pass.
        say: hears of what torch cannot.
    """
    if device.type != "cuda":
        yield
        return
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    memory: Any = torch.utils.deterministic
    filled = memory.fill_uninitialized_memory
    memory.fill_uninitialized_memory = False  # whatever is made is written before it is read
    # Strict where it can be: where torch only warns, attention takes kernels that add in any order.
    torch.use_deterministic_algorithms(True, warn_only=probe is None)
    lacking = None
    try:
        try:
            if probe is not None:
                probe()
        except RuntimeError as error:
            operation, found, _ = str(error).partition(NONE_THERE)
            if not found:
                raise
            lacking = operation.strip()
        if lacking := next(filter(None, process_group.all_gather(lacking)), None):
            say(
                f"{lacking} adds in no fixed order on a GPU: a run that is interrupted, or repeated, may end with "
                "other last digits."
            )
            torch.use_deterministic_algorithms(True, warn_only=True)
        with tolerant():
            yield
    finally:
        memory.fill_uninitialized_memory = filled
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@contextmanager
def tolerant() -> Iterator[None]:
    """Within the block torch is silent about what it cannot do in one order."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*deterministic")
        yield


@contextmanager
def forwards_only() -> Iterator[None]:
    """Within the block, of a validation, nothing is refused: without gradients hardly anything adds in any order."""
    strict = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    if strict:
        torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with tolerant():
            yield
    finally:
        torch.use_deterministic_algorithms(strict, warn_only=warn_only)
