"""What happens beside the updates: progress, speed, time limits, interrupts, losses that are no numbers."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from transformers.trainer_callback import ExportableState, TrainerCallback

from prunecli.errors import PruneError
from prunecli.processes import ALONE, ProcessGroup
from prunecli.progress import Say, unsaid
from prunecli.results.document import LARGEST
from prunecli.running.runner import ignored

REMEDY = "Lower --learning-rate, raise --warmup, or try `dtype=float32`, with --resume never."
"""Against numbers that grow without end."""


class TrainingError(PruneError):
    """A training that cannot go on."""


def require_number(value: float, step: int, what: str) -> None:
    """Stop a training that has come to nothing.

    Raises:
        TrainingError: `value` is NaN, infinite, or more than a result may hold.
    """
    if not abs(value) <= LARGEST:
        fault = "far too large" if math.isfinite(value) else "not a finite number"
        told = f"step {step:,}: the {what} is {value:.3g}, {fault}"
        if step == 0:
            raise TrainingError(told, "The weights that training begins with are damaged: copy them again.")
        raise TrainingError(f"{told}; the checkpoints before it are kept", REMEDY)


class Watch(TrainerCallback, ExportableState):  # type: ignore[misc]
    """Counts, reports and stops.

    Attributes:
        seconds: spent on updates, without validation and saving.
        tokens: that the decoder, or the only stack, read in these updates, padding left out, of all processes.
        elapsed: seconds of everything, earlier sittings of the same run included.
        unlogged: sum of the losses since the last log, and the step of that log.
        interrupted: a signal asked to stop.
    """

    def __init__(
        self,
        process_group: ProcessGroup = ALONE,
        *,
        limit: float | None = None,
        advance: Callable[[float], None] = ignored,
        report: Say = unsaid,
    ) -> None:
        self.process_group = process_group
        self.limit, self.advance, self.report = limit, advance, report
        self.seconds, self.tokens, self.elapsed = 0.0, 0, 0.0
        self.unlogged: tuple[float, int] | None = None
        self.interrupted = False
        self.training_loss: float | None = None
        self._mark = self._began = time.perf_counter()

    def state(self) -> dict[str, Any]:
        """What a resumed run goes on counting from."""
        now = time.perf_counter()
        kept: dict[str, Any] = {"seconds": self.seconds, "tokens": self.tokens, "unlogged": self.unlogged}
        kept["elapsed"] = self.elapsed + now - self._began
        return {"args": {}, "attributes": kept}

    def restore(self, kept: dict[str, Any]) -> None:
        """Go on from what `state` kept."""
        attributes = kept.get("attributes", {})
        self.seconds = float(attributes.get("seconds", 0.0))
        self.tokens = int(attributes.get("tokens", 0))
        self.elapsed = float(attributes.get("elapsed", 0.0))
        if attributes.get("unlogged"):
            total, step = attributes["unlogged"]
            self.unlogged = float(total), int(step)

    @property
    def tokens_per_second(self) -> float:
        """`tokens` per second of the updates."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The clock starts."""
        self.advance(state.global_step)
        # Every process draws its own dropout; a resumed run puts back what it had.
        torch.manual_seed(args.seed + self.process_group.rank)
        self._mark = self._began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count, and stop where something asks for it."""
        now = time.perf_counter()
        self.seconds += now - self._mark
        self._mark = now
        self.advance(1)
        over = self.limit is not None and self.elapsed + now - self._began >= self.limit
        if self.limit is not None and self.process_group.world_size > 1:
            # Their clocks differ, and all must stop at the same step.
            answer = torch.tensor([int(over)], device=args.device)
            torch.distributed.all_reduce(answer, op=torch.distributed.ReduceOp.MAX)
            over = bool(answer.item())
        if over:
            control.should_training_stop = control.should_save = True
            control.should_evaluate = args.eval_strategy != "no"
        if self.interrupted:
            control.should_training_stop = control.should_save = True

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        """The mean loss since the last log."""
        if "loss" in logs:
            self.training_loss = logs["loss"]
            require_number(logs["loss"], state.global_step, "training loss")

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: dict[str, float], **kwargs: Any
    ) -> None:
        """Say how good it is."""
        parts = [] if self.training_loss is None else [f"training loss {self.training_loss:.3f}"]
        if "eval_cosine" in metrics:
            parts.append(f"cosine to the teacher's vectors {metrics['eval_cosine']:.4f}")
        else:
            parts.append(f"validation loss {metrics['eval_loss']:.3f}")
        if "eval_chrf++" in metrics:
            parts.append(f"chrF++ {metrics['eval_chrf++']:.1f}")
        value = metrics[f"eval_{args.metric_for_best_model}"]
        better = state.best_metric is None or (
            value > state.best_metric if args.greater_is_better else value < state.best_metric
        )
        speed = f"; {self.tokens_per_second:,.0f} tokens a second" if state.global_step else ""
        best = " (best)" if better and state.global_step else ""
        self.report(f"step {state.global_step:,}: {', '.join(parts)}{best}{speed}")
        self._mark = time.perf_counter()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Time spent on saving is not the updates'."""
        self._mark = time.perf_counter()

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Within, the first Ctrl-C or polite kill ends the training after the step at hand, its state kept.

        Several processes would not all stop at the same step: there a signal ends the run at once, and the last
        checkpoint is what it goes on from.
        """
        numbers = (signal.SIGINT, signal.SIGTERM)
        if self.process_group.world_size > 1 or threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._stop) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if self.interrupted:
            raise KeyboardInterrupt
        self.interrupted = True
        self.report("Stopping after this step; its state is being kept.")
