"""What a training run depends on beside the model and the text."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from prunecli.evaluation.on_text import BatchOptions
from prunecli.options import (
    CheckpointPath,
    ComputeDtype,
    compute_option,
    option,
    training_option,
    validation_option,
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


class TrainingOptions(BatchOptions):
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
    teacher_logits: Path | None = training_option(
        None,
        "File of the teacher's likeliest tokens: written if it is missing. The teacher is not in memory then while the "
        "model learns.",
        role="output",
    )
    steps: int | None = option(1000, "Number of updates. Default: 1000, or --minutes.", ge=1)
    epochs: float | None = option(None, "Passes over the text, instead of updates.", metavar="E", gt=0)
    minutes: float | None = option(None, "Stop after this time, validations included.", metavar="M", gt=0)
    learning_rate: float = training_option(
        FINETUNE_RATE, "Highest learning rate. Default: 1e-4; 7e-4 from scratch.", metavar="R", gt=0
    )
    warmup: int = training_option(
        FINETUNE_WARMUP,
        "Updates in which the learning rate rises; then it falls with their inverse square root. Default: 200; 4000 "
        "from scratch.",
        hidden=True,
        ge=0,
    )
    train: TrainedPart = training_option("all", "Part that learns.")
    lora: int | None = training_option(
        None,
        "Learn updates of rank R of the linear layers (with --train experts of experts) and merge them; needs peft.",
        metavar="R",
        ge=1,
    )
    dropout: float | None = training_option(
        None,
        "Rate of all dropouts, in training alone. Default: that of config.json.",
        metavar="P",
        ge=0,
        le=0.99,
        hidden=True,
    )
    clip_norm: float = training_option(
        1.0, "Largest norm of the gradient of an update; 0: no limit.", ge=0, hidden=True
    )
    eval_every: int = validation_option(500, "Updates between validations.", ge=1)
    metric: ValidationMetric = validation_option(
        "loss", "Score by which the best model is chosen.", flag="--measure"
    )
    beam: int = validation_option(1, "Beams of the translations for chrf++.", ge=1, hidden=True)
    patience: int | None = validation_option(
        None, "Stop after N validations without a better one.", ge=1, hidden=True
    )
    batch_tokens: int = compute_option(4096, "Padded tokens of a batch's longer side.", ge=1)
    accumulate: int = compute_option(1, "Number of batches of an update.", hidden=True, ge=1)
    dtype: ComputeDtype = compute_option(
        "auto",
        "Type to compute in: auto (bfloat16 on a GPU that has it, else float32), float32, bfloat16, float16.",
        flag="--compute-dtype",
        metavar="TYPE",
    )
    device: str = compute_option(
        "auto", "auto (a GPU if there is one), cpu, cuda: one for each process.", metavar="NAME"
    )
    gradient_checkpointing: bool = compute_option(False, "Recompute activations: saves memory, costs time.")
    seed: int = training_option(0, "Seed of everything random.")
    loss: LossOptions = LossOptions()
    betas: tuple[float, float] = (0.9, 0.98)  # 1706.03762, 5.3; 2309.01826 names none
    context: int | None = None
