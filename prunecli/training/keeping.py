"""Results in the course of a training: which updates are kept, and when."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import TrainerCallback

from prunecli.model.checkpoint import Checkpoint
from prunecli.processes import ProcessGroup


@dataclass(frozen=True)
class Keep:
    """What is done with the model after some updates.

    Attributes:
        every: after each so many; None: only `at`.
        at: after these.
        write: takes the model, the checkpoint that it began as, and the update's number.
    """

    every: int | None
    at: tuple[int, ...]
    write: Callable[[Any, Checkpoint, int], None]

    def is_due(self, step: int) -> bool:
        """Whether the model is kept after this update."""
        return step in self.at or (self.every is not None and step % self.every == 0)


class Keeper(TrainerCallback):  # type: ignore[misc]
    """Has the first of several processes write."""

    def __init__(self, keep: Keep, model: Any, source: Checkpoint, process_group: ProcessGroup) -> None:
        self.keep, self.model, self.source, self.process_group = keep, model, source, process_group

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """After an update."""
        if self.process_group.is_main and self.keep.is_due(state.global_step):
            self.keep.write(self.model, self.source, state.global_step)
