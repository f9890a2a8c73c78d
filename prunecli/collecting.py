"""Python's collector of cycles, while tens of thousands of small objects are made that stay."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

OBJECTS = 2_000_000
"""New objects after which the collector looks for cycles."""


@contextmanager
def seldom() -> Iterator[None]:
    """Have it look after `OBJECTS` new objects instead of 700, each time at many of those that stay.

    For what makes no cycles of large values: of a checkpoint of 70,000 tensors it took a third of the time.
    """
    first, *others = gc.get_threshold()
    if first:  # 0: it is turned off
        gc.set_threshold(max(first, OBJECTS), *others)
    try:
        yield
    finally:
        gc.set_threshold(first, *others)
