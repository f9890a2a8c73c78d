"""What a training run depends on beside the model and the text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from prunecli.evaluation.on_text import RunOptions
from prunecli.options import (
    COMPUTE,
    TRAINING,
    VALIDATION,
    CheckpointPath,
    ComputeDtype,
    option,
)

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


class TrainingOptions(RunOptions):
    """Options that say how a model is trained.

    Attributes:
        loss: what is minimised.
        betas: Adam's.
        context: tokens of a window of plain text; None: see `window_length`.
    """

    teacher: CheckpointPath | None = option(
        None,
        "Checkpoint to learn from, with the same vocabulary, such as the unreduced model.",
        metavar="DIR",
        role="checkpoint",
    )
    steps: int | None = option(1000, "Number of updates. Default: 1000, or --minutes.", ge=1)
    epochs: float | None = option(None, "Passes over the text, instead of updates.", metavar="E", gt=0)
    minutes: float | None = option(None, "Stop after this time, validations included.", metavar="M", gt=0)
    learning_rate: float = option(
        FINETUNE_RATE,
        "Highest learning rate. Default: 1e-4; 7e-4 from scratch.",
        metavar="R",
        panel=TRAINING,
        gt=0,
    )
    warmup: int = option(
        FINETUNE_WARMUP,
        "Updates in which the learning rate rises; then it falls with their inverse square root. Default: 200; 4000 "
        "from scratch.",
        panel=TRAINING,
        hidden=True,
        ge=0,
    )
    train: TrainedPart = option("all", "Part that learns.", panel=TRAINING)
    lora: int | None = option(
        None,
        "Learn updates of rank R of the linear layers (with --train experts of experts) and merge them; needs peft.",
        metavar="R",
        panel=TRAINING,
        ge=1,
    )
    dropout: float | None = option(
        None,
        "Rate of all dropouts, in training alone. Default: that of config.json.",
        metavar="P",
        panel=TRAINING,
        ge=0,
        le=0.99,
        hidden=True,
    )
    clip_norm: float = option(
        1.0, "Largest norm of the gradient of an update; 0: no limit.", panel=TRAINING, ge=0, hidden=True
    )
    eval_every: int = option(
        500,
        "Updates between validations.",
        panel=VALIDATION,
        ge=1,
    )
    metric: ValidationMetric = option(
        "loss", "Score by which the best model is chosen.", flag="--measure", panel=VALIDATION
    )
    beam: int = option(1, "Beams of the translations for chrf++.", panel=VALIDATION, ge=1, hidden=True)
    patience: int | None = option(
        None, "Stop after N validations without a better one.", panel=VALIDATION, ge=1, hidden=True
    )
    batch_tokens: int = option(
        4096,
        "Padded tokens of a batch's longer side.",
        panel=COMPUTE,
        ge=1,
    )
    accumulate: int = option(1, "Number of batches of an update.", panel=COMPUTE, hidden=True, ge=1)
    dtype: ComputeDtype = option(
        "float32",
        "Type to compute in.",
        flag="--compute-dtype",
        metavar="TYPE",
        panel=COMPUTE,
    )
    device: str = option(
        "auto",
        "auto (a GPU if there is one), cpu, cuda: one for each process.",
        metavar="NAME",
        panel=COMPUTE,
    )
    gradient_checkpointing: bool = option(
        False, "Recompute activations: saves memory, costs time.", panel=COMPUTE
    )
    seed: int = option(0, "Seed of everything random.", panel=TRAINING)
    loss: LossOptions = LossOptions()
    betas: tuple[float, float] = (0.9, 0.98)  # 1706.03762, 5.3; 2309.01826 names none
    context: int | None = None
