"""Which layers go: runs of layers, and layers that the command line names."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np

from prunecli.errors import UsageError


def nearest_run(distances: np.ndarray, count: int) -> tuple[int, ...]:
    """The `count` consecutive layers whose input and output are nearest (2403.17887, 3.2), the first of equal ones.

    Args:
        distances: `[depth + 1, depth + 1]`, of the states before the layers and after the last.
        count: less than there are layers.
    """
    if count == 0:
        return ()
    starts = range(len(distances) - count)
    start = min(starts, key=lambda start: float(distances[start, start + count]))
    return tuple(range(start, start + count))


def best_runs(distances: np.ndarray, count: int) -> tuple[float, ...]:
    """Of each layer, how near the input and output of the best run of `count` layers are that it lies in.

    Those of `nearest_run` have the least.
    """
    runs = [float(distances[start, start + count]) for start in range(len(distances) - count)]
    return tuple(min(runs[max(0, number - count + 1) : number + 1]) for number in range(len(distances) - 1))


def parse_layers(option: str, text: str, depths: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """`3,7-9`, or `encoder:3,7,decoder:1`: numbers of layers by side, ascending.

    Args:
        option: what the text was given to, for messages.
        text: the numbers; a side holds until the next one is named, and a model with one stack needs none.
        depths: layers of each side of the model.

    Raises:
        UsageError: it is not of this form, or names what the model has not.
    """
    found: dict[str, set[int]] = {}
    side: str | None = next(iter(depths)) if len(depths) == 1 else None
    for part in text.split(","):
        match = re.fullmatch(r"\s*(?:(encoder|decoder)\s*:\s*)?(\d+)(?:\s*-\s*(\d+))?\s*", part)
        if match is None:
            raise UsageError(
                f"{option} {part.strip()!r}: no number of a layer.", "Write 3,7-9 or encoder:3,decoder:1."
            )
        side = match[1] or side
        if side is None:
            raise UsageError(
                f"{option} {text}: of which stack?",
                f"Write encoder:{part.strip()} or decoder:{part.strip()}.",
            )
        if side not in depths:
            raise UsageError(
                f"{option}: the model has no {side}.", f"It has {', '.join(depths)} layers only."
            )
        first, last = int(match[2]), int(match[3] or match[2])
        if not first <= last < depths[side]:
            raise UsageError(
                f"{option} {part.strip()}: the {side} has the layers 0 to {depths[side] - 1}.",
                "Count from 0.",
            )
        found.setdefault(side, set()).update(range(first, last + 1))
    return {name: tuple(sorted(numbers)) for name, numbers in found.items()}
