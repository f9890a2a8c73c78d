"""Several processes of one command, as `torchrun` and `accelerate launch` start them: who does what, and the whole."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from prunecli.errors import PruneError

T = TypeVar("T")

PATIENCE = timedelta(days=7)
"""How long one process waits for the others; one that ends is noticed at once."""


def rank() -> int:
    """The number of this process among those that were started together; 0 where it is alone."""
    return int(os.environ.get("RANK", "0")) if count() > 1 else 0


def count() -> int:
    """How many processes were started together."""
    return int(os.environ.get("WORLD_SIZE", "1"))


PARENT = "PRUNECLI_PARENT"
"""The environment variable that names the process with which a step of a recipe ends."""


def end_with_parent() -> None:
    """A step of a recipe does not outlive the `run` that started it, though that be killed: on Linux alone."""
    parent = os.environ.pop(PARENT, None)
    if parent is None or not sys.platform.startswith("linux"):
        return
    set_parent_death_signal = 1
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(set_parent_death_signal, int(signal.SIGTERM))
    if str(os.getppid()) != parent:  # it ended before this
        sys.exit(128 + signal.SIGTERM)


@dataclass(frozen=True)
class Place:
    """One of the processes that work together.

    Attributes:
        rank: its number.
        processes: how many there are.
    """

    rank: int = 0
    processes: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this process writes and speaks for all."""
        return self.rank == 0

    def share(self, items: Sequence[T]) -> Sequence[T]:
        """The items of this process: every n-th."""
        return items[self.rank :: self.processes]

    def sums(self, values: Sequence[float]) -> list[float]:
        """Each value summed over the processes."""
        gathered = self.gathered(list(values))
        return [sum(column) for column in zip(*gathered, strict=True)]

    def first(self, value: T) -> T:
        """The `value` of the first process, on each of them."""
        return self.gathered(value)[0]

    def gathered(self, value: T) -> list[T]:
        """The `value` of every process, on each of them; waits for all.

        Raises:
            PruneError: another process has ended.
        """
        if self.processes == 1:
            return [value]
        import torch

        found: list[Any] = [None] * self.processes
        try:
            torch.distributed.all_gather_object(found, value)
        except RuntimeError as error:  # gloo's, when a connection closes
            raise PruneError(
                f"process {self.rank} of {self.processes} stops: another one has ended",
                "Mend what that one says; the same command goes on from what is finished.",
            ) from error
        return found


ALONE = Place()
"""The place of a process that was started alone."""


@contextmanager
def together() -> Iterator[Place]:
    """Join the processes that were started together; alone, nothing is joined.

    Raises:
        PruneError: they cannot reach each other.
    """
    if count() == 1:
        yield ALONE
        return
    import torch

    group = torch.distributed
    if group.is_initialized():
        yield Place(group.get_rank(), group.get_world_size())
        return
    try:
        group.init_process_group("gloo", timeout=PATIENCE)
    except (RuntimeError, ValueError) as error:
        raise PruneError(
            f"the {count()} processes cannot join: {' '.join(str(error).split())}",
            "Start them with torchrun --nproc-per-node N -m prunecli ….",
        ) from error
    try:
        yield Place(group.get_rank(), group.get_world_size())
    finally:
        group.destroy_process_group()
