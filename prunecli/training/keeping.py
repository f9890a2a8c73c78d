"""Results in the course of a training: which updates are kept, and when."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import TrainerCallback

from prunecli.model.checkpoint import Checkpoint


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
    """Writes the model after the updates that `keep` names.

    Args:
        source: the checkpoint that training began with.
        whole_model: returns the model that is written. Every process calls it; the first process uses its result.
    """

    def __init__(self, keep: Keep, source: Checkpoint, whole_model: Callable[[], Any]) -> None:
        self.keep, self.source, self.whole_model = keep, source, whole_model

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Write the model if it is due."""
        if not self.keep.is_due(state.global_step):
            return
        model = self.whole_model()
        if args.should_save:
            self.keep.write(model, self.source, state.global_step)
