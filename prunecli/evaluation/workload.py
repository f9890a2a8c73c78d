"""What `bench-latency` times of a checkpoint, whatever its task."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

if TYPE_CHECKING:
    from typing_extensions import Self

Phase = Literal["prefill", "decode"] | None
"""None: the whole pass, of a task that is not told apart."""
Rows = Sequence[Sequence[int]]
"""Token ids of each example."""


@dataclass(frozen=True)
class Workload(ABC):
    """The examples of a checkpoint, as its own tokenizer sees them.

    Attributes:
        rows: of each example the tokens that are read.
        pad_id: fills up the rows of a batch.
    """

    decodes: ClassVar[bool] = True
    """Whether the model is loaded for decoding, and tokens are counted."""

    rows: Rows
    pad_id: int

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def longest(self) -> int:
        """Tokens of the longest example."""
        return max(map(len, self.rows))

    def part(self, start: int, stop: int) -> Self:
        """These examples alone."""
        return replace(self, rows=self.rows[start:stop])

    @property
    @abstractmethod
    def tokens(self) -> dict[Phase, int]:
        """What each phase reads, or generates, of all examples."""

    @abstractmethod
    def run(self, model: Any, beam: int) -> dict[Phase, float]:
        """Seconds of each phase, all examples in one batch."""


def finished_at(model: Any) -> float:
    """The time at which the device has done all that it was given."""
    import torch

    getattr(torch, model.device.type).synchronize()
    return time.perf_counter()
