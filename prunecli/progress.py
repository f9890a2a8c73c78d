"""How long work reports its progress, without knowing who listens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol


class Progress(Protocol):
    """Opens one progress line; `with progress("reading", 10, "files") as advance: advance(1)`."""

    def __call__(
        self, description: str, total: float | None = None, unit: str = "steps"
    ) -> AbstractContextManager[Callable[[float], None]]:
        """Open a line of `total` units (None: unknown); the callable that it yields adds to it."""


@contextmanager
def silent(
    description: str, total: float | None = None, unit: str = "steps"
) -> Iterator[Callable[[float], None]]:
    """A progress that shows nothing: the library's default."""
    yield lambda _amount: None


Say = Callable[[str], None]
"""Hears one plain line that is worth knowing: what was chosen, and why."""


def unsaid(_line: str) -> None:
    """A `Say` that nobody hears: the library's default."""
