"""What happens beside the updates: progress, speed, time limits, interrupts, results in between, validation."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from transformers.trainer_callback import ExportableState, TrainerCallback

from prunecli.errors import PruneError
from prunecli.processes import ProcessGroup, handling
from prunecli.progress import Advance, Say
from prunecli.results.document import LARGEST
from prunecli.running.examples import IGNORED, Examples
from prunecli.training.loss import Objective

REMEDY = "Lower `learning_rate`, raise `warmup`, or try `dtype=float32`, with `resume=never`."
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


@dataclass(eq=False)
class Watch(TrainerCallback, ExportableState):  # type: ignore[misc]
    """Counts, reports and stops.

    Attributes:
        limit: seconds that the training may take, if there is a limit.
        advance: called with the number of finished updates.
        seconds: spent on updates, without validation and saving.
        tokens: that the decoder, or the only stack, read in these updates, padding left out, of all processes.
        elapsed: seconds of everything, earlier sittings of the same run included.
        interrupted: a signal asked to stop.
        start: value of the metric before the first update; None without validation.
    """

    process_group: ProcessGroup
    limit: float | None
    advance: Advance
    report: Say
    seconds: float = 0.0
    tokens: int = 0
    elapsed: float = 0.0
    interrupted: bool = False
    training_loss: float | None = None
    start: float | None = None

    def __post_init__(self) -> None:
        self._mark = self._began = time.perf_counter()

    def state(self) -> dict[str, Any]:
        """The counters, from which a resumed run counts on."""
        kept = {name: getattr(self, name) for name in ("seconds", "tokens", "start")}
        kept["elapsed"] = self.elapsed + time.perf_counter() - self._began
        return {"args": {}, "attributes": kept}

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
        elapsed = self.elapsed + now - self._began
        # The clocks of several processes differ, and all must stop at the same step.
        if self.limit is not None and max(self.process_group.all_gather(elapsed)) >= self.limit:
            control.should_training_stop = control.should_save = True
            control.should_evaluate = args.eval_strategy != "no"
        if self.interrupted:
            control.should_training_stop = control.should_save = True
        # The Trainer does not store the losses since the last log: a resumed run begins with none.
        control.should_log |= control.should_save

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
        sign = 1 if args.greater_is_better else -1
        note = speed = ""
        if state.global_step:
            speed = f"; {self.tokens_per_second:,.0f} tokens a second"
            if self.start is not None and sign * value <= sign * self.start:
                note = " (no better than the start)"
            elif state.best_metric is None or sign * value > sign * state.best_metric:
                note = " (best)"
        else:
            self.start = value
        self.report(f"step {state.global_step:,}: {', '.join(parts)}{note}{speed}")
        self._mark = time.perf_counter()

    def on_save(self, *_arguments: Any, **_options: Any) -> None:
        """Time spent on saving is not the updates'."""
        self._mark = time.perf_counter()

    def signals(self) -> AbstractContextManager[None]:
        """Within, the first Ctrl-C or polite kill ends the training after the step at hand, its state kept.

        Several processes would not all stop at the same step: there a signal ends the run at once, and the last
        checkpoint is what it goes on from.
        """
        numbers = () if self.process_group.world_size > 1 else (signal.SIGINT, signal.SIGTERM)
        return handling(dict.fromkeys(numbers, self._stop))

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if self.interrupted:
            raise KeyboardInterrupt
        self.interrupted = True
        self.report("Stopping after this step; its state is being kept.")


@dataclass(eq=False)
class Keep(TrainerCallback):  # type: ignore[misc]
    """Writes the model after some updates.

    Attributes:
        every: after each so many; None: only `at`.
        at: after these.
        write: takes the model and the update's number; only the first process calls it.
        whole_model: returns the model to be written. Every process calls it.
    """

    every: int | None
    at: tuple[int, ...]
    write: Callable[[Any, int], None]
    whole_model: Callable[[], Any] = field(init=False)

    def is_due(self, step: int) -> bool:
        """Whether the model is written after this update."""
        return step in self.at or (self.every is not None and step % self.every == 0)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the model if it is due."""
        if self.is_due(state.global_step):
            model = self.whole_model()
            if args.should_save:
                self.write(model, state.global_step)


@dataclass(frozen=True)
class Validation:
    """Held-out text.

    Attributes:
        batch_tokens: padded tokens in a batch.
        objective: what the loss is the mean of, over the scored tokens.
        chrf: returns chrF++ of translations of the text; None: it is not measured.
    """

    examples: Examples
    batch_tokens: int
    objective: Objective
    chrf: Callable[[Any, ProcessGroup], float] | None = None

    def measure(self, model: Any, process_group: ProcessGroup) -> Mapping[str, float]:
        """`loss`: mean of the objective per scored token, in nats, and its `figures`; `chrf++`.

        The model is put into evaluation mode.
        """
        model.eval()
        total, count = 0.0, 0
        batches = self.examples.cut(self.batch_tokens)
        for first in range(0, len(batches), process_group.world_size):
            # Where weights are sharded, every process takes part in each forward pass: some run a batch for nothing.
            number = first + process_group.rank
            batch = self.examples.batch(batches[min(number, len(batches) - 1)])
            tensors = {name: value.to(model.device) for name, value in batch.with_labels.items()}
            with torch.no_grad():
                loss = float(self.objective(model, tensors))
            if number < len(batches):
                total += loss
                count += int((batch.labels != IGNORED).sum())
        total, tokens = process_group.all_reduce([total, count])
        loss = total / max(tokens, 1)
        scores = {"loss": loss, **self.objective.figures(loss)}
        if self.chrf is not None:
            scores["chrf++"] = self.chrf(model, process_group)
        return scores
