"""Experts of a layer, one after another, each on its rows of every pass; passes are shared out to threads.

Threads do not wait for each other after each expert: one may be ahead by as many experts as there are buffers. Each
pass is in one thread's hands, so that what its experts add to it is added in their order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, wait
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from prunecli.modules.grouped import begun
from prunecli.running.layerwise.reading import Loaded, Reader


@dataclass(kw_only=True)
class Assigned:
    """Which rows of one pass go to which expert of a sparse layer.

    Attributes:
        starts: first row of each expert, and the end of the last.
        shared_out: whether the layer would share the experts out to threads.
        attention: outputs of those of the layer's attentions that are kept, by number, as trees of `Stored`.
    """

    starts: list[int]
    shared_out: bool
    attention: dict[int, Any] = field(default_factory=dict)

    def span(self, expert: int) -> tuple[int, int]:
        """First row of an expert, and the end of its last."""
        return self.starts[expert], self.starts[expert + 1]

    def goes_to(self, expert: int) -> bool:
        """Whether any token goes there."""
        first, end = self.span(expert)
        return first < end


Sent = TypeVar("Sent", bound=Assigned)


def run_experts(
    run: Callable[[Sent, int, Loaded], None], reader: Reader, wanted: Sequence[int], passes: Sequence[Sent]
) -> None:
    """`run` each expert on every pass that has rows for it, with its weights.

    With the kernels of a whole layer, to the last bit: where it would give each expert to one thread, so is it here.

    Args:
        run: of a pass, an expert, and what was read of it; without gradients.
        reader: was asked for the experts.
        wanted: their numbers.
        passes: with their rows.

    Raises:
        Exception: what a call raised, or `Reader.take`; all threads have ended then.
    """
    together = [one for one in passes if not one.shared_out]
    apart = _lanes([one for one in passes if one.shared_out], torch.get_num_threads())
    blocks = _Blocks(reader, len(wanted), len(apart) + bool(together))

    def go(lane: Sequence[Sent]) -> None:
        try:
            with closing(blocks.each()) as taken:
                for expert, loaded in zip(wanted, taken, strict=False):
                    for one in lane:
                        if one.goes_to(expert):
                            run(one, expert, loaded)
        except BaseException:
            blocks.end()
            raise

    threads = begun(go, apart)
    try:
        if together:
            go(together)
        for thread in threads:
            thread.result()
    except BaseException:
        blocks.end()
        wait(threads)  # they use what is given back next
        raise


def _lanes(passes: Sequence[Sent], most: int) -> list[list[Sent]]:
    """The passes in up to so many parts, of about as many rows."""
    lanes: list[list[Sent]] = [[] for _ in range(min(most, len(passes)))]
    for one in sorted(passes, key=_rows, reverse=True):
        min(lanes, key=lambda lane: sum(map(_rows, lane))).append(one)
    return lanes


def _rows(one: Assigned) -> int:
    return one.starts[-1]


class _Blocks:
    """What a reader was asked for, for several threads, each of which goes through it all at its own pace.

    Args:
        reader: was asked for `count` blocks.
        threads: that will call `each`.
    """

    def __init__(self, reader: Reader, count: int, threads: int) -> None:
        self._reader, self._count, self._threads = reader, count, threads
        self._taken: list[Future[Loaded]] = []
        self._left: list[int] = []
        self._lock = threading.Lock()
        self._ended = False

    def each(self) -> Generator[Loaded]:
        """One after another, each for as long as the caller is at it."""
        for number in range(self._count):
            if self._ended:
                return
            loaded = self._get(number)
            try:
                yield loaded
            finally:
                self._leave(number, loaded)

    def end(self) -> None:
        """Have all threads stop at the block that they are at."""
        self._ended = True

    def _get(self, number: int) -> Loaded:
        with self._lock:
            is_first = number == len(self._taken)
            if is_first:
                self._taken.append(Future())
                self._left.append(self._threads)
        found = self._taken[number]
        if is_first:  # without the lock: who takes may wait for those behind to leave
            try:
                found.set_result(self._reader.take())
            except BaseException as error:
                found.set_exception(error)
        return found.result()

    def _leave(self, number: int, loaded: Loaded) -> None:
        with self._lock:
            self._left[number] -= 1
            is_last = not self._left[number]
        if is_last:
            self._reader.give_back(loaded)
