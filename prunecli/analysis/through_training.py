"""Cost of pruning at each step of a training (1905.10650, section 6 and Figure 5)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prunecli.analysis.removed import is_made_from
from prunecli.model.checkpoint import Checkpoint


@dataclass(frozen=True)
class Kept:
    """Step of a training that a checkpoint belongs to.

    Attributes:
        updates: of the weights, that its original had seen.
        original: index of the one that it was made from, its own of a checkpoint that the training wrote.
    """

    updates: int
    original: int


def kept_of_one_training(checkpoints: Sequence[Checkpoint], removed: Sequence[float]) -> list[Kept] | None:
    """The step of each checkpoint, if one training wrote all of them, or the models that they were reduced from.

    Args:
        removed: fraction that each has lost.

    Returns:
        None where they were not, or where two of one step have lost the same fraction: a line would have two values.
    """
    histories = [checkpoint.structure.history for checkpoint in checkpoints]
    originals = []
    for index, one in enumerate(checkpoints):
        sources = [other for other, model in enumerate(checkpoints) if is_made_from(one, model)]
        originals.append(max(sources, key=lambda other: len(histories[other]), default=index))
    starts = sorted(set(originals))
    trainings = [_training(histories[start]) for start in starts]
    found = [Kept(_updates(histories[original]), original) for original in originals]
    if trainings[0] is None or any(training != trainings[0] for training in trainings):
        return None
    places = {(kept.updates, round(share, 3)) for kept, share in zip(found, removed, strict=True)}
    several = len({kept.updates for kept in found}) > 1
    is_one = several and len(starts) < len(checkpoints) and len(places) == len(found)
    return found if is_one else None


def _training(history: Sequence[Mapping[str, Any]]) -> object | None:
    """Value that is equal for all checkpoints of one training; None if the last step is no training."""
    if not history or history[-1].get("command") != "finetune" or not _updates(history):
        return None
    arguments = {k: v for k, v in history[-1]["arguments"].items() if k not in ("steps", "best")}
    return [*history[:-1], {**history[-1], "arguments": arguments}]


def _updates(history: Sequence[Mapping[str, Any]]) -> int:
    steps = history[-1].get("arguments", {}).get("steps") if history else None
    return steps if type(steps) is int and steps > 0 else 0
