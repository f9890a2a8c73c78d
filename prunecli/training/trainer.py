"""transformers' Trainer with batches, loss and validation of our own; optimizer, schedule and checkpoints are its.

Callbacks watch what happens beside the updates: progress, speed, time limits, interrupts, results in between.
"""

import errno
import math
import os
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from transformers import EarlyStoppingCallback, PrinterCallback, Trainer, TrainingArguments
from transformers.trainer_callback import ExportableState, TrainerCallback

from prunecli.errors import OutputError, PruneError, UsageError
from prunecli.modules.devices import choose_device
from prunecli.modules.fitting import multiplies_natively
from prunecli.modules.saving import save_tensors
from prunecli.processes import PATIENCE, ProcessGroup, handling, join, started_here, world_size
from prunecli.progress import Advance, Say
from prunecli.results.document import LARGEST
from prunecli.running.examples import IGNORED, Examples
from prunecli.tensors.transaction import output_error, require_space
from prunecli.training.data import BucketSampler, Validation, loader
from prunecli.training.loss import Objective
from prunecli.training.options import TrainingOptions
from prunecli.training.state import (
    FIXED,
    WEIGHTS,
    WORKSPACE,
    fill,
    fixed_order,
    last_checkpoint,
    repeatable,
    sound_state,
)

Inputs = dict[str, Tensor]
"""Name of an input, or of a parameter -> tensor."""
LOG_EVERY = 50
"""Updates between two looks at the loss, each of which waits for the device."""

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


class _Arguments(TrainingArguments):  # type: ignore[misc]
    @property
    def n_gpu(self) -> int:
        """One for a process, never torch's DataParallel."""
        count: int = super().n_gpu
        return min(count, 1)


def with_dtype(options: TrainingOptions) -> TrainingOptions:
    """Return the options with the type that `auto` is on their device."""
    if options.dtype != "auto":
        return options
    on_gpu = options.device != "cpu" and torch.cuda.is_available()
    is_fast = on_gpu and multiplies_natively(torch.bfloat16, torch.device("cuda"))
    return options.updated(dtype="bfloat16" if is_fast else "float32")


def training_arguments(options: TrainingOptions, state: Path, *, validates: bool) -> TrainingArguments:
    """The Trainer's arguments; asking for their `device` joins the processes that `torchrun` started.

    Raises:
        UsageError: a device or type that cannot be used.
    """
    device = options.device
    if device not in ("auto", "cpu", "cuda"):
        raise UsageError(
            f"`device={device}`: training runs on auto, cpu or cuda",
            "Choose the GPUs with CUDA_VISIBLE_DEVICES, and start one process for each with torchrun.",
        )
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("`device=cuda`: torch finds no GPU here", "Try `device=cpu`.")
    on_cpu = device == "cpu" or not torch.cuda.is_available()
    if not on_cpu:
        # NCCL takes one process on each GPU, and training fills it.
        processes, gpus = started_here(), torch.cuda.device_count()
        if processes > gpus:
            raise UsageError(
                f"{processes} processes on this machine, and {gpus} GPU{'s' if gpus > 1 else ''}: each process trains "
                "on one of its own",
                f"Start {gpus} (torchrun --nproc-per-node {gpus}), with `accumulate` for larger updates; or "
                "`device=cpu`.",
            )
        os.environ.setdefault(WORKSPACE, FIXED)  # before anything is multiplied on a GPU
    elif world_size() > 1:
        join()  # accelerate would, with a patience of half an hour
    if options.dtype == "bfloat16" and not on_cpu and not torch.cuda.is_bf16_supported():
        raise UsageError("`dtype=bfloat16`: this GPU does not know it", "Choose `dtype=float32`.")
    if options.dtype == "float16" and on_cpu:
        raise UsageError("`dtype=float16`: only a GPU trains in it", "Choose bfloat16 or float32.")
    every = options.eval_every
    arguments = _Arguments(
        output_dir=str(state),
        max_steps=1,  # set when the text is known
        per_device_train_batch_size=1,
        gradient_accumulation_steps=options.accumulate,
        learning_rate=options.learning_rate,
        lr_scheduler_type="inverse_sqrt",
        warmup_steps=options.warmup,
        optim="adamw_torch_fused",
        weight_decay=0.0,  # AdamW without decay is Adam
        adam_beta1=options.betas[0],
        adam_beta2=options.betas[1],
        max_grad_norm=options.clip_norm,
        bf16=options.dtype == "bfloat16",
        fp16=options.dtype == "float16",
        use_cpu=on_cpu,
        ddp_find_unused_parameters=True,  # an attention without heads, a layer that is left out at random
        ddp_backend="gloo" if on_cpu and world_size() > 1 else None,
        ddp_timeout=int(PATIENCE.total_seconds()),  # NCCL's, while the first process saves or reads alone
        seed=options.seed,
        logging_steps=min(LOG_EVERY, every),
        logging_nan_inf_filter=False,  # it waits for the device at every step
        eval_strategy="steps" if validates else "no",
        eval_steps=every,
        save_steps=every,
        save_total_limit=2,
        metric_for_best_model=options.metric,
        greater_is_better=options.metric != "loss",
        remove_unused_columns=False,
        report_to="none",
        disable_tqdm=True,
        log_level="error",
        log_level_replica="error",
    )
    if arguments.device.type == "cuda":
        choose_device(str(arguments.device))
    return arguments


def _shares_parameters(model: Any) -> bool:
    """Whether modules share a parameter; an output layer that is tied to the input table does not count."""
    names = Counter(id(weight) for _, weight in model.named_parameters(remove_duplicate=False))
    if (output := model.get_output_embeddings()) is not None:
        names[id(output.weight)] -= 1  # accelerate puts it into one group with the input table
    return max(names.values()) > 1


class FinetuneTrainer(Trainer):  # type: ignore[misc]
    """One run.

    Args:
        model: to be trained, its weights in float32.
        args: of `training_arguments`.
        examples: to train on.
        objective: what is minimised.
        validation: held-out text, or None.
        options: what `args` were made of.
        watch: counts and reports.
    """

    loss_is_scaled_for_ga = True

    def __init__(
        self,
        model: Any,
        args: TrainingArguments,
        examples: Examples,
        objective: Objective,
        validation: Validation | None,
        options: TrainingOptions,
        watch: Watch,
    ) -> None:
        self.examples, self.objective, self.validation = examples, objective, validation
        self.options, self.watch = options, watch
        self.process_group = watch.process_group
        self.learned = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        own = [watch]
        if validation is not None and options.patience is not None:
            own.append(EarlyStoppingCallback(options.patience))
        super().__init__(
            model=model,
            args=args,
            train_dataset=range(len(examples.lengths)),
            eval_dataset=None if validation is None else range(len(validation.examples.lengths)),
            callbacks=own,
        )
        self.remove_callback(PrinterCallback)
        self.is_sharded = bool(self.is_fsdp_enabled or self.is_deepspeed_enabled)
        if self.is_deepspeed_enabled:  # else ZeRO-3 does not hand out whole weights
            zero = self.accelerator.deepspeed_plugin.deepspeed_config["zero_optimization"]
            zero["stage3_gather_16bit_weights_on_model_save"] = True
        if self.is_sharded:
            if options.metric == "chrf++":
                raise UsageError(
                    "`metric=chrf++`: sharded weights do not translate",
                    "Choose `metric=loss`, or train without FSDP.",
                )
            if self.accelerator.is_fsdp2 and _shares_parameters(model):
                # accelerate puts the modules that share a parameter into several groups, which torch refuses.
                raise UsageError(
                    "accelerate is set to FSDP: it cannot shard a model in which modules share parameters",
                    "Choose distributed_type MULTI_GPU in its config; `lora` or `train` take less memory.",
                )
            objective.in_blocks = False
            if validation is not None:
                validation.objective.in_blocks = False

    def get_train_dataloader(self) -> Any:
        """This process's batches."""
        sampler = BucketSampler(
            self.examples,
            self.options.batch_tokens,
            self.options.seed,
            self.process_group.rank,
            self.process_group.world_size,
        )
        return loader(sampler, pin=self.args.device.type == "cuda")

    def floating_point_ops(self, inputs: Inputs) -> int:
        """Return 0: counting would cost time at every step, and the weights that run are not those that are stored."""
        return 0

    def get_batch_samples(
        self, epoch_iterator: Iterator[Inputs], num_batches: int, device: torch.device
    ) -> tuple[list[Inputs], int]:
        """The batches of an update, and how many tokens are scored in them on all processes."""
        batches = list(islice(epoch_iterator, num_batches))
        scored = sum(int((batch["labels"] != IGNORED).sum()) for batch in batches)
        # Tokens of the stack with the head; those of an encoder beside a decoder do not count.
        masks = (batch.get("decoder_attention_mask", batch["attention_mask"]) for batch in batches)
        read = sum(int(mask.sum()) for mask in masks)
        scored, read = map(int, self.process_group.all_reduce([scored, read]))
        self.watch.tokens += read
        return batches, scored

    def probe(self) -> None:
        """A batch forwards and back: what an update computes, and leaves no gradient of it."""
        try:
            inputs = self._prepare_inputs(next(iter(self.get_train_dataloader())))
            self.model.train()
            with self.compute_loss_context_manager():
                loss = self.objective(self.model, inputs)
            loss.backward()  # type: ignore[no-untyped-call]
        finally:
            self.model.zero_grad(set_to_none=True)

    def compute_loss(self, model: Any, inputs: Inputs, num_items_in_batch: int) -> Any:
        """This batch's part of the mean over the update's tokens.

        Times the processes, since gradients are averaged over them.
        """
        return self.objective(model, inputs) * (self.process_group.world_size / max(num_items_in_batch, 1))

    def evaluate(self, **_options: Any) -> dict[str, float]:
        """Validate; the best is kept."""
        assert self.validation is not None
        # Without gradients hardly anything adds in any order: nothing is refused.
        with fixed_order(self.args.device, warn_only=True):
            found = self.validation.measure(self.model, self.process_group)
        metrics = {f"eval_{name}": value for name, value in found.items()}
        require_number(found["loss"], self.state.global_step, "validation loss")
        self.log(metrics)
        self.control: Any = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def run(self, disk_bytes: Callable[[range], int]) -> Path:
        """Train to the end, from the last checkpoint if there is one.

        Args:
            disk_bytes: bytes that the training holds on the disk at most, for the updates that are left.

        Returns:
            The directory with the weights of the result.

        Raises:
            PruneError: the disk is too small, the last checkpoint is damaged, or another process has ended.
            KeyboardInterrupt: a signal ended the training; its state is kept.
        """
        state, group, report = Path(self.args.output_dir), self.process_group, self.watch.report
        last, steps = last_checkpoint(state), self.args.max_steps
        if last is not None:
            self.state = sound_state(last)
            # The counters of the callbacks; the Trainer's own way would put back the old --patience too.
            for callback in self.callback_handler.callbacks:
                counters = self.state.stateful_callbacks.get(type(callback).__name__, {})
                for name, value in counters.get("attributes", {}).items():
                    setattr(callback, name, value)
        step = self.state.global_step
        if last is not None and (step >= steps or self._has_stopped()):
            report("The training had ended before; writing its result.")
        else:
            if last is not None:
                report(f"Resuming from step {step:,} in {state}.")
            if group.is_main:
                stored = sum(path.stat().st_size for path in state.glob("checkpoint-*/*"))
                require_space(state, disk_bytes(range(step, steps)) - stored)
            self.args.eval_on_start = self.validation is not None and last is None
            order = repeatable(self.args.device, None if self.is_sharded else self.probe, group, report)
            try:
                with self.watch.signals(), order:
                    self.train(resume_from_checkpoint=None if last is None else str(last))
            except RuntimeError as error:  # torch notices when gradients are summed that a process has ended
                if group.world_size > 1 and any(word in str(error) for word in ("onnection", "gloo", "NCCL")):
                    raise PruneError(
                        f"process {group.rank} of {group.world_size} stops: another one has ended",
                        "Mend what that one says; the same command resumes from the last validation.",
                    ) from error
                raise
        step = self.state.global_step
        if self.watch.interrupted:
            report(f"Stopped after step {step:,}: {state} is kept; the same command resumes from it.")
            raise KeyboardInterrupt
        best = Path(self.state.best_model_checkpoint or "")
        is_kept = self.validation is not None and best.name and best.is_dir()
        return best if is_kept else state / f"checkpoint-{step}"

    def _has_stopped(self) -> bool:
        """Whether the run that was resumed had ended by `minutes` or `patience`, as they are now."""
        limit = self.watch.limit
        return (limit is not None and self.watch.elapsed >= limit) or any(
            callback.early_stopping_patience_counter >= callback.early_stopping_patience
            for callback in self.callback_handler.callbacks
            if isinstance(callback, EarlyStoppingCallback)
        )

    def weights(self) -> Inputs:
        """Each parameter that learns, whole. All processes call this; of sharded ones only the first has the result."""
        if not self.is_sharded:
            return self.learned
        whole = self.accelerator.get_state_dict(self.model_wrapped)
        return {name: whole[name] for name in self.learned} if self.args.should_save else {}

    def whole_model(self, build: Callable[[], Any]) -> Any:
        """The model to be written in the course of the training. All processes call this; the first uses the result.

        Args:
            build: makes a model as this one was before the training. Sharded weights are put into one; so are those
                with low-rank updates, which writing merges into the weights.
        """
        if not self.is_sharded and self.options.lora is None:
            return self.model
        weights = self.weights()
        if not self.args.should_save:
            return None
        model = build()
        fill(model, weights)
        return model

    def _save_checkpoint(self, *arguments: Any) -> None:
        """Write a checkpoint: whole, or not at all.

        Raises:
            OutputError: the disk does not take the checkpoint; earlier checkpoints stay.
        """
        state = Path(self.args.output_dir)
        directory = state / f"checkpoint-{self.state.global_step}"
        try:
            super()._save_checkpoint(*arguments)
        except (OSError, RuntimeError) as error:
            is_full = "inline_container" in str(error)  # torch.save on a full disk
            if isinstance(error, RuntimeError) and not is_full:
                raise
            shutil.rmtree(directory, ignore_errors=True)
            failed = output_error(
                directory, error if isinstance(error, OSError) else OSError(errno.ENOSPC, "")
            )
            last = last_checkpoint(state)
            raise OutputError(
                f"{failed.message}; {f'{last} is kept' if last else 'the updates so far are lost'}",
                f"Free some space, then repeat the same command{': it resumes from there' if last else ''}.",
            ) from error

    def save_model(self, output_dir: str, **_options: Any) -> None:
        """Keep the weights, and what a resumed run goes on from; a model that has come to nothing is not kept.

        Raises:
            TrainingError: a weight is not finite.
        """
        weights = self.weights()
        is_finite = all(bool(weight.isfinite().all()) for weight in weights.values())
        if not all(self.process_group.all_gather(is_finite)):
            raise TrainingError(
                f"step {self.state.global_step:,}: a weight is not a finite number; the checkpoints before it are kept",
                REMEDY,
            )
        if self.args.should_save:
            directory = Path(output_dir)
            directory.mkdir(parents=True, exist_ok=True)
            save_tensors(weights, directory / WEIGHTS)

    def figures(self) -> dict[str, Any]:
        """Figures of a finished training: steps, speed, losses, validations."""
        history = self.state.log_history
        training = [
            {"step": row["step"], "loss": round(row["loss"], 6), "learning_rate": row["learning_rate"]}
            for row in history
            if "loss" in row
        ]
        validation = [
            {
                "step": row["step"],
                **{key.removeprefix("eval_"): round(row[key], 6) for key in row if key.startswith("eval_")},
            }
            for row in history
            if "eval_loss" in row
        ]
        metric, best = self.options.metric, self.state.best_metric
        return {
            "steps": self.state.global_step,
            "warmup": self.args.warmup_steps,
            "epochs": round(self.state.epoch or 0.0, 4),
            "metric": metric if validation else None,
            "best": None if best is None else {"step": self.state.best_global_step, metric: round(best, 6)},
            "tokens": self.watch.tokens,
            "seconds": round(self.watch.seconds, 3),
            "tokens_per_second": round(self.watch.tokens_per_second, 1),
            "parameters": sum(weight.numel() for weight in self.model.parameters() if weight.requires_grad),
            "training": training,
            "validation": validation,
        }
