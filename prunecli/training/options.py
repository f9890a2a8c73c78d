"""What a training run depends on beside the model and the text."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from prunecli.choices import Choices

ValidationMetric = Literal["loss", "chrf++"]

TrainedPart = Literal["all", "routers", "embeddings", "experts"]

SCRATCH_RATE, SCRATCH_WARMUP = 7e-4, 4000
"""2309.01826, section 3: Adam's learning rate and warm-up of a model that is trained from scratch."""

FINETUNE_RATE, FINETUNE_WARMUP = 1e-4, 200
"""Of a model that has been trained before: less, or it would first forget what it knows."""


@dataclass(frozen=True)
class LossOptions:
    """See `prunecli.training.loss`.

    Attributes:
        label_smoothing: share of the target's probability that is spread evenly over the vocabulary.
        distill: weight w of the teacher's distribution; the cross-entropy has the weight 1 - w.
        temperature: T, by which logits are divided for the teacher's distribution.
        hidden: weight of the distance to the teacher's last hidden states.
    """

    label_smoothing: float = 0.1
    distill: float = 0.0
    temperature: float = 1.0
    hidden: float = 0.0


@dataclass(frozen=True)
class TrainingOptions(Choices):
    """How a model is trained.

    Attributes:
        loss: what is made small.
        steps: updates of the weights.
        epochs: passes over the text, where `steps` is None.
        minutes: stop after so long, or None.
        batch_tokens: padded tokens of a batch's longer side, on each process.
        accumulate: batches of an update, on each process.
        learning_rate: the highest, from which it falls with 1/sqrt(updates).
        warmup: updates until it is reached.
        betas: Adam's.
        clip_norm: longest gradient; 0: any.
        dtype: "float32"; "bfloat16", or "float16" with a scaled loss, for autocast with weights kept in float32.
        device: "auto", "cpu", "cuda": one for each process.
        eval_every: updates between two validations, each of which keeps the state.
        metric: by which the best model is chosen.
        patience: stop after so many validations without a better one; None: never.
        beam: of the translations that chrF++ scores.
        teacher: checkpoint to learn from, or None.
        context: tokens of a window of plain text; None: see `window_length`.
        dropout: rate of all dropouts while it is trained; None: those of config.json.
        train: the part whose parameters learn.
        lora: rank of the updates that learn in the place of weights; None: weights learn.
        gradient_checkpointing: compute a layer's activations again on the way back, rather than keep them.
        seed: of the order of the batches, of dropout and of what is masked.
    """

    loss: LossOptions = field(default_factory=LossOptions)
    steps: int | None = 1000
    epochs: float | None = None
    minutes: float | None = None
    batch_tokens: int = 4096
    accumulate: int = 1
    learning_rate: float = FINETUNE_RATE
    warmup: int = FINETUNE_WARMUP
    betas: tuple[float, float] = (0.9, 0.98)  # 1706.03762, 5.3; 2309.01826 names none
    clip_norm: float = 1.0
    dtype: str = "float32"
    device: str = "auto"
    eval_every: int = 500
    metric: ValidationMetric = "loss"
    patience: int | None = None
    beam: int = 1
    teacher: Path | None = None
    context: int | None = None
    dropout: float | None = None
    train: TrainedPart = "all"
    lora: int | None = None
    gradient_checkpointing: bool = False
    seed: int = 0
