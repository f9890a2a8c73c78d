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
        "Checkpoint to learn from, with the same vocabulary, such as the unreduced model.",
        metavar="DIR",
        role="checkpoint",
    )
    teacher_logits: Path | None = training_option(
        "File of the teacher's likeliest tokens: written if it is missing. The teacher is not in memory then while the "
        "model learns.",
        role="output",
    )
    steps: int | None = option("Number of updates. Default: 1000, or --minutes.", 1000, ge=1)
    epochs: float | None = option("Passes over the text, instead of updates.", metavar="E", gt=0)
    minutes: float | None = option("Stop after this time, validations included.", metavar="M", gt=0)
    learning_rate: float = training_option(
        "Highest learning rate. Default: 1e-4; 7e-4 from scratch.", FINETUNE_RATE, metavar="R", gt=0
    )
    warmup: int = training_option(
        "Updates in which the learning rate rises; then it falls with their inverse square root. Default: 200; 4000 "
        "from scratch.",
        FINETUNE_WARMUP,
        hidden=True,
        ge=0,
    )
    train: TrainedPart = training_option("Part that learns.", "all")
    lora: int | None = training_option(
        "Learn updates of rank R of the linear layers (with --train experts of experts) and merge them; needs peft.",
        metavar="R",
        needs="train=all train=experts",
        ge=1,
    )
    dropout: float | None = training_option(
        "Rate of all dropouts, in training alone. Default: that of config.json.",
        metavar="P",
        ge=0,
        le=0.99,
        hidden=True,
    )
    clip_norm: float = training_option(
        "Largest norm of the gradient of an update; 0: no limit.", 1.0, ge=0, hidden=True
    )
    eval_every: int = validation_option("Updates between validations.", 500, ge=1)
    metric: ValidationMetric = validation_option(
        "Score by which the best model is chosen.", "loss", flag="--measure"
    )
    beam: int = validation_option(
        "Beams of the translations for chrf++.", 1, ge=1, hidden=True, needs="metric=chrf++"
    )
    patience: int | None = validation_option(
        "Stop after N validations without a better one.", ge=1, hidden=True
    )
    batch_tokens: int = compute_option("Padded tokens of a batch's longer side.", 4096, ge=1)
    accumulate: int = compute_option("Number of batches of an update.", 1, hidden=True, ge=1)
    dtype: ComputeDtype = compute_option(
        "Type to compute in: auto (bfloat16 on a GPU that has it, else float32), float32, bfloat16, float16.",
        "auto",
        flag="--compute-dtype",
        metavar="TYPE",
    )
    device: str = compute_option(
        "auto (a GPU if there is one), cpu, cuda: one for each process.", "auto", metavar="NAME"
    )
    gradient_checkpointing: bool = compute_option("Recompute activations: saves memory, costs time.", False)
    seed: int = training_option("Seed of everything random.", 0)
    loss: LossOptions = LossOptions()
    betas: tuple[float, float] = (0.9, 0.98)  # 1706.03762, 5.3; 2309.01826 names none
    context: int | None = None
