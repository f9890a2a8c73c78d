"""Streams of a pretended GPU: what they do is done at once, what no event or wait would have ordered is counted."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Stream:
    """One of a `Timeline`.

    Attributes:
        clock: operations so far.
        done: how many of them the host has waited for.
        knows: other stream -> how many of its operations come before this one's next.
    """

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self.clock = self.done = 0
        self.knows = Counter[Stream]()

    def synchronize(self) -> None:
        self._timeline.waited("synchronize")
        self.finish(self.clock)

    def finish(self, clock: int) -> None:
        self.done = max(self.done, clock)
        self._timeline.check()

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        if event.stream is not None:
            self.knows |= event.knows

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())


class Event:
    """A mark of what a stream had done when it was recorded."""

    def __init__(self, **_options: Any) -> None:
        self.stream = None
        self.knows = Counter[Stream]()

    def record(self, stream: Stream | None = None) -> None:
        self.stream = stream or torch.cuda.current_stream()  # type: ignore[assignment]
        self.knows = self.stream.knows | Counter({self.stream: self.stream.clock})  # type: ignore[union-attr, dict-item]

    def synchronize(self) -> None:
        if self.stream is not None:
            self.stream._timeline.waited("event")
            self.stream.finish(self.knows[self.stream])


class Timeline:
    """All streams of a GPU.

    Attributes:
        races: accesses of memory after one by another stream that nothing orders, by line.
        overwritten: pinned buffers that the host wrote to before their copy was done.
    """

    def __init__(self, waited: Callable[[str], None], caller: Callable[[], str]) -> None:
        self.waited, self._caller = waited, caller
        self.races, self.overwritten = Counter[str](), 0
        self._default, self._local = Stream(self), threading.local()
        self._access = {}
        self._sending = []

    @property
    def current(self) -> Stream:
        return getattr(self._local, "stream", self._default)

    @contextmanager
    def within(self, stream: Stream) -> Iterator[None]:
        before, self._local.stream = self.current, stream
        try:
            yield
        finally:
            self._local.stream = before

    @property
    def kind(self) -> type[Stream]:
        """The class of a stream, as `torch.cuda.Stream`."""
        timeline = self

        class OfGpu(Stream):
            def __init__(self, _device: object = None) -> None:
                super().__init__(timeline)

        return OfGpu

    def took(self, storage: int) -> None:
        """The current stream has this memory from now on; kernels before may use it still, for what it was before."""
        self._access[storage] = {self.current: self.current.clock}

    def touch(self, storages: Iterable[int]) -> None:
        """An operation of the current stream on this memory."""
        mine = self.current
        mine.clock += 1
        for storage in set(storages):
            seen = self._access.setdefault(storage, {})
            if any(clock > max(one.done, mine.knows[one]) for one, clock in seen.items() if one is not mine):
                self.races[self._caller()] += 1
            seen[mine] = mine.clock

    def sends(self, source: torch.Tensor) -> None:
        """The current stream copies pinned memory, some time."""
        self._sending.append((self.current, self.current.clock, source, source.clone()))

    def check(self) -> None:
        """Whether what is copied by now was there all the while."""
        done = [one for one in self._sending if one[1] <= one[0].done]
        self._sending = [one for one in self._sending if one[1] > one[0].done]
        self.overwritten += sum(not torch.equal(source, sent) for _, _, source, sent in done)

    def settle(self) -> None:
        """The device has done everything."""
        for stream, clock, _, _ in self._sending:
            stream.done = max(stream.done, clock)
        self.check()
