"""transformers' Trainer with batches, loss and validation of our own; optimizer, schedule and checkpoints are its."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import EarlyStoppingCallback, PrinterCallback, Trainer, TrainerState, TrainingArguments

from prunecli.errors import UsageError
from prunecli.processes import ProcessGroup
from prunecli.running.examples import IGNORED, Examples
from prunecli.training.batches import BucketSampler, EpochLoader, loader
from prunecli.training.loss import Objective
from prunecli.training.options import TrainingOptions
from prunecli.training.state import TRAINER_STATE, load_weights, save_weights
from prunecli.training.validation import Validation
from prunecli.training.watch import REMEDY, TrainingError, Watch, require_number

LOG_EVERY = 50
"""Updates between two looks at the loss, each of which waits for the device."""

NEVER = 1 << 30
"""Validations without a better one that no run lives to see."""


def training_arguments(options: TrainingOptions, state: Path, *, validates: bool) -> TrainingArguments:
    """The Trainer's arguments; asking for their `device` joins the processes that `torchrun` started.

    Raises:
        UsageError: a device or type that cannot be used.
    """
    on_cpu = _on_cpu(options.device)
    if options.dtype == "bfloat16" and not on_cpu and not torch.cuda.is_bf16_supported():
        raise UsageError("--dtype bfloat16: this GPU does not know it", "Choose --dtype float32.")
    every = options.eval_every
    made = TrainingArguments(
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
        use_cpu=on_cpu,
        ddp_backend="gloo" if on_cpu and int(os.environ.get("WORLD_SIZE", "1")) > 1 else None,
        seed=options.seed,
        logging_steps=min(LOG_EVERY, every),
        logging_nan_inf_filter=False,  # it waits for the device at every step
        eval_strategy="steps" if validates else "no",
        eval_steps=every if validates else None,
        save_strategy="steps",
        save_steps=every,
        save_total_limit=2,
        load_best_model_at_end=validates,
        metric_for_best_model=options.metric if validates else None,
        greater_is_better=options.metric != "loss" if validates else None,
        remove_unused_columns=False,
        report_to="none",
        disable_tqdm=True,
        log_level="error",
        log_level_replica="error",
    )
    _ = made.device
    made._n_gpu = min(made.n_gpu, 1)  # one process, one GPU: never torch's DataParallel
    return made


def _on_cpu(device: str) -> bool:
    if device not in ("auto", "cpu", "cuda"):
        raise UsageError(
            f"--device {device}: training runs on auto, cpu or cuda",
            "Choose the GPUs with CUDA_VISIBLE_DEVICES, and start one process for each with torchrun.",
        )
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch finds no GPU here", "Try --device cpu.")
    return device == "cpu" or not torch.cuda.is_available()


def _mask(batch: Mapping[str, Tensor]) -> Tensor:
    """Which tokens of the stack with the head are no padding."""
    return batch["decoder_attention_mask" if "decoder_attention_mask" in batch else "attention_mask"]


def choose_attention(model: Any, device: torch.device, dtype: str) -> None:
    """Have `model` run the attention that is fastest here.

    On a CPU in bfloat16 torch's fused one is slow: of an update of a 6 + 6 layer model it takes a quarter.
    """
    if device.type == "cpu" and dtype == "bfloat16":
        model.set_attn_implementation("eager")


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
        self.process_group = ProcessGroup(args.process_index, args.world_size)
        self.resumed: tuple[float, int] | None = None
        callbacks: list[Any] = [watch]
        if validation is not None:
            callbacks.append(EarlyStoppingCallback(options.patience or NEVER))
        super().__init__(
            model=model,
            args=args,
            train_dataset=range(len(examples.lengths)),
            eval_dataset=None if validation is None else range(len(validation.examples.lengths)),
            callbacks=callbacks,
        )
        self.remove_callback(PrinterCallback)

    def _run_epoch(self, *arguments: Any, **options: Any) -> None:
        """An epoch; the first of a resumed run goes on with the sum of losses that was not logged yet."""
        if self.resumed is not None:
            total, step = self.resumed
            self._tr_loss += total
            self._globalstep_last_logged = step
            self.resumed = None
        super()._run_epoch(*arguments, **options)

    def get_train_dataloader(self) -> EpochLoader:
        """This process's batches."""
        sampler = BucketSampler(
            self.examples.lengths,
            self.options.batch_tokens,
            self.options.seed,
            self.process_group.rank,
            self.process_group.world_size,
            self.examples.set_epoch,
        )
        return loader(self.examples, sampler, pin=self.args.device.type == "cuda")

    def floating_point_ops(self, inputs: dict[str, Tensor]) -> int:
        """Not counted: it costs time at every step, and the weights that run are not those that are held."""
        return 0

    def _get_num_items_in_batch(self, batch_samples: Sequence[dict[str, Tensor]], device: Any) -> int:
        """Scored tokens of an update: of all its batches, on all processes."""
        scored = sum(int((batch["labels"] != IGNORED).sum()) for batch in batch_samples)
        read = sum(int(_mask(batch).sum()) for batch in batch_samples)
        if self.process_group.world_size > 1:
            total = torch.tensor([scored, read], device=device)
            torch.distributed.all_reduce(total)
            scored, read = total.tolist()
        self.watch.tokens += read
        return scored

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: int | None = None,
    ) -> Any:
        """This batch's part of the mean over the update's tokens.

        Times the processes, since gradients are averaged over them.
        """
        return self.objective(model, inputs) * (
            self.process_group.world_size / max(num_items_in_batch or 1, 1)
        )

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Validate; the best is kept."""
        assert self.validation is not None
        found = self.validation.measure(self.model, self.process_group)
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in found.items()}
        require_number(found["loss"], self.state.global_step, "validation loss")
        self.log(metrics)
        handler: Any = self.callback_handler
        self.control: Any = handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def restore(self, state: Mapping[str, Any]) -> None:
        """Counters of the callbacks; the Trainer's own way would put back the old --patience too."""
        kept = state.get("stateful_callbacks", {})
        self.watch.restore(kept.get("Watch", {}))
        self.resumed = self.watch.unlogged
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, EarlyStoppingCallback):
                counted = kept.get("EarlyStoppingCallback", {}).get("attributes", {})
                callback.early_stopping_patience_counter = counted.get("early_stopping_patience_counter", 0)

    def adopt(self, checkpoint: Path) -> None:
        """Take over a run that has as many updates as are asked for: its best model, or else its last."""
        self.state = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE))
        best = self.state.best_model_checkpoint
        load_weights(self.model, Path(best) if best and Path(best).is_dir() else checkpoint)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Keep the state; a model that has come to nothing is not kept."""
        if not all(bool(held.isfinite().all()) for held in self.model.parameters()):
            raise TrainingError(
                f"step {self.state.global_step:,}: a weight is not a finite number; the checkpoints before it are kept",
                REMEDY,
            )
        total = sum(self.process_group.all_gather(float(self._tr_loss))) / self.process_group.world_size
        self.watch.unlogged = total, self._globalstep_last_logged
        super()._save_checkpoint(model, trial)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        directory = Path(output_dir or self.args.output_dir)
        if self.args.should_save:
            directory.mkdir(parents=True, exist_ok=True)
            save_weights(self.model, directory)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        load_weights(self.model, Path(resume_from_checkpoint))

    def _load_best_model(self) -> None:
        load_weights(self.model, Path(self.state.best_model_checkpoint))
