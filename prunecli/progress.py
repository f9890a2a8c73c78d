"""How long work reports its progress, without knowing who listens."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

Advance = Callable[[float], None]
"""Adds an amount to a progress line."""


class Progress(Protocol):
    """Opens one progress line; `with progress("reading", 10, "files") as advance: advance(1)`."""

    def __call__(
        self, description: str, total: float | None = None, unit: str = "steps"
    ) -> AbstractContextManager[Advance]:
        """Open a line of `total` units (None: unknown); the callable that it yields adds to it."""


@contextmanager
def silent(description: str, total: float | None = None, unit: str = "steps") -> Iterator[Advance]:
    """A progress that shows nothing: the library's default."""
    yield lambda _amount: None


Say = Callable[[str], None]
"""Hears one plain line that is worth knowing: what was chosen, and why."""


def unsaid(_line: str) -> None:
    """A `Say` that nobody hears: the library's default."""


TOLD_AFTER_S = 10.0
"""Seconds of work after which its rate is known."""

LONG_S = 120.0
"""Seconds above which how long the work takes is worth a word."""


def foretelling(progress: Progress, whole: float, say: Say, what: str, remedy: str) -> Progress:
    """`progress` that says once, as soon as the rate is known, how long all its lines take, where that is long.

    Args:
        whole: units of all lines together.
        what: they are.
        remedy: what makes them fewer.
    """
    start: float | None = None
    done, told = 0.0, False

    @contextmanager
    def line(description: str, total: float | None = None, unit: str = "steps") -> Iterator[Advance]:
        nonlocal start
        start = time.monotonic() if start is None else start
        with progress(description, total, unit) as advance:

            def advanced(step: float) -> None:
                nonlocal done, told
                advance(step)
                done += step
                passed = time.monotonic() - start
                if done and not told and passed >= TOLD_AFTER_S:
                    told = True
                    if (seconds := passed * whole / done) > LONG_S:
                        say(f"{what}: about {duration_text(seconds)}; {remedy}.")

            yield advanced

    return line


def duration_text(seconds: float) -> str:
    """0.031 -> "0.03 s", 75 -> "75 s", 500 -> "8.3 min", 20000 -> "5.6 h"."""
    if seconds < 100:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 6000 else f"{seconds / 3600:,.1f} h"
