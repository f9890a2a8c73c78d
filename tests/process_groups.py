"""Several processes that are threads of this one, of which one runs at a time: nothing has to be started."""

import pickle
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from prunecli.errors import PruneError
from prunecli.processes import ProcessGroup

T = TypeVar("T")


class _Meeting:
    """A place where processes wait for each other; the one that has the turn runs."""

    def __init__(self, count: int) -> None:
        self.turn = threading.Condition()
        self.values = [b""] * count
        self.here = self.times = self.ended = 0

    def wait(self) -> bool:
        """Let the others run until all are here; False where one of them has ended instead."""
        times = self.times
        self.here += 1
        if self.here == len(self.values):
            self.here, self.times = 0, times + 1
            self.turn.notify_all()
        self.turn.wait_for(lambda: self.times > times or self.ended, 60)
        return self.times > times


@dataclass(frozen=True)
class ThreadGroup(ProcessGroup):
    """A group whose processes are threads; values pass between them as copies."""

    meeting: _Meeting = field(default_factory=lambda: _Meeting(1))

    def all_gather(self, value: T) -> list[T]:
        self.meeting.values[self.rank] = pickle.dumps(value)
        self.wait()
        found = [pickle.loads(one) for one in self.meeting.values]
        self.wait()
        return found

    def wait(self) -> None:
        if not self.meeting.wait():
            raise PruneError(f"process {self.rank} stops: another one has ended")


def at_once(count: int, work: Callable[[ProcessGroup], Any]) -> list[Any]:
    """Return what `work` returns, or raises, in each of so many processes."""
    meeting = _Meeting(count)
    found = [None] * count

    def run(rank: int) -> None:
        with meeting.turn:
            try:
                found[rank] = work(ThreadGroup(rank, count, meeting))
            except BaseException as error:
                found[rank] = error
            finally:
                meeting.ended += 1
                meeting.turn.notify_all()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found
