"""Several processes of one command, as `torchrun` and `accelerate launch` start them: who does what, and the whole."""

import ctypes
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from prunecli.errors import PruneError, reason_of

T = TypeVar("T")

COMMAND: ContextVar[Sequence[str]] = ContextVar("COMMAND", default=())
"""The words of the command line that prunecli carries out; empty where a program calls prunecli."""

PATIENCE = timedelta(days=7)
"""How long one process waits for the others; one that ends is noticed at once."""


def rank() -> int:
    """The number of this process among those that were started together; 0 where it is alone."""
    return int(os.environ.get("RANK", "0")) if world_size() > 1 else 0


def world_size() -> int:
    """How many processes were started together."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def started_here() -> int:
    """How many of them are on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", str(world_size()))) if world_size() > 1 else 1


def neighbours(device: str) -> int:
    """How many of them, this one among them, share a "cpu" or a "cuda" device of this machine."""
    here = started_here()
    if device != "cuda":
        return here
    import torch

    return -(-here // max(1, torch.cuda.device_count()))


class StoppedError(PruneError):
    """This process ends because the one that started it says so."""

    exit_status = 128 + signal.SIGTERM


def environment() -> dict[str, str]:
    """Environment variables of this process, with which a new one imports this prunecli even if it is not installed."""
    path = [str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}


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


GOES_ON = "Mend what that one says; the same command resumes from what is finished."


@dataclass(frozen=True)
class ProcessGroup:
    """The processes that work together, as one of them sees them.

    Its methods but `share` are called by all of them, and wait for all.

    Attributes:
        rank: number of this process.
        world_size: how many there are.
    """

    rank: int = 0
    world_size: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this process writes and speaks for all."""
        return self.rank == 0

    def share(self, items: Sequence[T]) -> Sequence[T]:
        """The items of this process: every n-th."""
        return items[self.rank :: self.world_size]

    def gather_shares(self, done: Sequence[T]) -> list[T]:
        """Return the results of all processes, in the order that the items had before they were shared."""
        parts = self.all_gather(list(done))
        total = sum(map(len, parts))
        return [parts[number % self.world_size][number // self.world_size] for number in range(total)]

    def all_reduce(self, values: Sequence[float]) -> list[float]:
        """Each value summed over the processes."""
        gathered = self.all_gather(list(values))
        return [sum(column) for column in zip(*gathered, strict=True)]

    def broadcast(self, value: T) -> T:
        """The `value` of the first process, on each of them."""
        return self.all_gather(value)[0]

    def require_same(self, values: Mapping[str, Any]) -> None:
        """Have all processes work on the same.

        Args:
            values: what the work depends on, under the names by which a message calls it.

        Raises:
            PruneError: it differs; all processes raise it.
        """
        found = self.all_gather(dict(values))
        differing = [name for name in values if any(one.get(name) != found[0][name] for one in found)]
        if differing:
            raise PruneError(
                f"process {self.rank} of {self.world_size} stops: "
                f"they do not have the same {', '.join(differing)}",
                "Start all with the same command, on machines with the same files.",
            )

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Waits until all processes are through the block; where one fails, all end.

        Raises:
            PruneError: another process has failed, or ended.
        """
        try:
            yield
        except PruneError:
            self.all_gather(False)
            raise
        if False in self.all_gather(True):
            raise PruneError(f"process {self.rank} of {self.world_size} stops: another one has failed")

    def all_gather(self, value: T) -> list[T]:
        """The `value` of every process, on each of them; waits for all.

        Raises:
            PruneError: another process has ended.
        """
        if self.world_size == 1:
            return [value]
        import torch

        found: list[Any] = [None] * self.world_size
        try:
            torch.distributed.all_gather_object(found, value)
        except RuntimeError as error:  # gloo's, when a connection closes
            raise PruneError(
                f"process {self.rank} of {self.world_size} stops: another one has ended", GOES_ON
            ) from error.with_traceback(None)  # whose frames hold the group: see `leave`
        return found


ALONE = ProcessGroup()
"""The group of a process that was started alone."""


@contextmanager
def together() -> Iterator[ProcessGroup]:
    """Join the processes that were started together; alone, nothing is joined.

    `cuda` without a number is from then on another GPU for each process of a machine, where there are as many.

    Raises:
        PruneError: they cannot reach each other.
        StoppedError: this one was told to end, meanwhile.
    """
    if world_size() == 1:
        yield ALONE
        return
    try:
        import torch

        group = torch.distributed
        was_joined = group.is_initialized()
        join()
        try:
            yield ProcessGroup(group.get_rank(), group.get_world_size())
        finally:
            if not was_joined:
                leave()
    except SystemExit as end:
        if end.code != StoppedError.exit_status:
            raise
        raise StoppedError(
            f"process {rank()} of {world_size()} stops: it was told to, as torchrun does when another one has ended",
            GOES_ON,
        ) from end


def leave() -> None:
    """End this process's part in the group that it joined, here or by way of transformers' Trainer; alone, nothing.

    What still held the group, as a model trained in step does, would have its threads outlive Python, and these now and
    then abort a process whose work is done.
    """
    if world_size() == 1:
        return
    import torch

    gc.collect()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def join() -> None:
    """Have this process be one of those that were started together, where it is not yet.

    Raises:
        PruneError: they cannot reach each other.
    """
    import torch

    if torch.distributed.is_initialized():
        return
    failed = []

    def run() -> None:
        try:
            torch.distributed.init_process_group("gloo", timeout=PATIENCE)
        except BaseException as error:
            failed.append(error)

    # In another thread: torch waits outside of Python, where no signal would be heard.
    thread = threading.Thread(target=run, name="join", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.1)
    for error in failed:
        if not isinstance(error, (RuntimeError, ValueError)):
            raise error
        raise PruneError(
            f"the {world_size()} processes cannot join: {reason_of(error)}",
            "Start them with torchrun --nproc-per-node N -m prunecli ….",
        ) from error
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


TERMINATIONS = (signal.SIGTERM, signal.SIGHUP)
"""Signals that ask a process to end, as a kill and a closed terminal do."""


@contextmanager
def handling(handlers: Mapping[signal.Signals, Callable[[int, Any], None]]) -> Iterator[None]:
    """Handle signals otherwise within the block; main thread only, which alone hears them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Ctrl-C and signals that would end this process wait until the block is through."""
    came = []
    try:
        with handling(dict.fromkeys((signal.SIGINT, *TERMINATIONS), lambda found, _: came.append(found))):
            yield
    finally:
        for found in came[:1]:
            signal.raise_signal(found)


@contextmanager
def terminations_as_exit() -> Iterator[None]:
    """SIGTERM and SIGHUP, where nothing else hears them, end the process as `SystemExit`: cleaning up happens."""

    def leave(number: int, _frame: Any) -> None:
        raise SystemExit(128 + number)

    unheard = [number for number in TERMINATIONS if signal.getsignal(number) == signal.SIG_DFL]
    with handling(dict.fromkeys(unheard, leave)):
        yield
