"""What experts are chosen from, without a checkpoint."""

from __future__ import annotations

from typing import Any, NamedTuple


class Layer(NamedTuple):
    """What is chosen from."""

    name: str
    side: Any
    experts: tuple[int, ...]
