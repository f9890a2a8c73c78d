"""What one checkpoint scores, whatever the task."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray


@dataclass(frozen=True)
class Measured:
    """What one checkpoint scores.

    Attributes:
        scores: of all texts.
        values: of the examples, which are tested against the baseline's.
        windows: how texts were cut, for the file.
        by_text: name of texts -> scores of these.
    """

    scores: Mapping[str, Any]
    values: NDArray[Any]
    windows: Mapping[str, Any] = field(default_factory=dict)
    by_text: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
