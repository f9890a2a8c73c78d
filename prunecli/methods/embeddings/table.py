"""Rows of an embedding table, read in slices, and what they weigh."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prunecli.errors import CheckpointError, UsageError

Array = NDArray[np.float32]
Rows = Callable[[int, int], NDArray[np.generic]]
"""(start, stop) -> those rows [stop - start, m], of any floating type."""
CHUNK_ROWS = 4096


@dataclass(frozen=True)
class Table:
    """A pretrained table that is never held as a whole.

    Attributes:
        vocabulary: its rows V.
        model_dim: its width m.
        read: a slice of its rows.
        name: for messages.
    """

    vocabulary: int
    model_dim: int
    read: Rows
    name: str = "The embedding table"

    @classmethod
    def of(cls, array: NDArray[np.generic], name: str = "The embedding table") -> Table:
        """An array or a memory map [V, m]."""
        vocabulary, model_dim = array.shape
        return cls(vocabulary, model_dim, lambda start, stop: array[start:stop], name)

    def rows(self, start: int, stop: int) -> Array:
        """Rows `start` to `stop` in float32.

        Raises:
            CheckpointError: one of them is not finite.
        """
        found: Array = np.asarray(self.read(start, stop)).astype(np.float32)
        bad = ~np.isfinite(found).all(axis=1)
        if bad.any():
            row = start + int(bad.argmax())
            raise CheckpointError(
                f"{self.name}: row {row} holds a value that is not finite",
                "The checkpoint is damaged; copy it again.",
            )
        return found

    def chunks(self, chunk_rows: int = CHUNK_ROWS) -> Iterator[tuple[int, int, Array]]:
        """Start, stop and rows, from the first row to the last."""
        for start in range(0, self.vocabulary, chunk_rows):
            stop = min(start + chunk_rows, self.vocabulary)
            yield start, stop, self.rows(start, stop)


def row_weights(
    vocabulary: int,
    counts: NDArray[np.integer] | None = None,
    *,
    power: float = 0.5,
    ignored: tuple[int, ...] = (),
) -> Array:
    """What each row's error counts for [V]: (count + 1)^power, divided by the mean; all 1 without counts.

    A token that the text lacks counts as one that it holds once, less one: a little, not nothing. The counts of a
    text fall so steeply that with power 1 a handful of tokens would decide the fit; the root evens that out.

    Args:
        vocabulary: rows of the table.
        counts: occurrences of every token in a text [V].
        power: 1 weighs by frequency, 0 not at all.
        ignored: rows that weigh nothing, such as a padding row of zeros.

    Raises:
        UsageError: every row is ignored.
    """
    weights = np.ones(vocabulary, np.float64)
    if counts is not None:
        weights = (np.asarray(counts, np.float64) + 1) ** power
    weights[list(ignored)] = 0
    if not weights.any():
        raise UsageError("Every row of the table is left out", "Leave at least one row in.")
    return np.asarray(weights / weights.sum() * np.count_nonzero(weights), np.float32)
