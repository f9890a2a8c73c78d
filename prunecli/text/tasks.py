"""What a model is for: its task, by the class that its checkpoint names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from prunecli.errors import UsageError

if TYPE_CHECKING:
    from prunecli.model.checkpoint import Checkpoint

TaskName = Literal["translation", "classification", "mlm", "lm", "embedding"]
"""What a model can be measured at: `embedding`, the vectors of texts, needs no head."""
TASKS = get_args(TaskName)
TrainingTask = Literal[TaskName, "feature-extraction"]
"""What a model can be trained for."""
HEADLESS = ("embedding", "feature-extraction")
"""Tasks of models without a head, which learn from a teacher alone."""

_ENDINGS: Mapping[str, TrainingTask] = {
    **dict.fromkeys(
        ("Model", "TokenClassification", "QuestionAnswering", "MultipleChoice", "Prediction", "PreTraining"),
        "feature-extraction",
    ),
    "LMHeadModel": "lm",
    "WithLMHeadModel": "mlm",
    "ForSequenceClassification": "classification",
    "ForMaskedLM": "mlm",
}
"""Of a class -> what it is for; the longer of two endings last. An encoder with a decoder translates without a head."""


def has_decoder(name: str, *, is_pair: bool) -> bool:
    """Whether a class of transformers has an encoder with a decoder; some have the encoder alone of such a config.

    Args:
        is_pair: what config.json says.
    """
    return is_pair and not name.endswith("EncoderModel")


def task_of_class(name: str, *, is_pair: bool) -> TrainingTask:
    """The task of a class of transformers.

    Args:
        is_pair: whether it is an encoder with a decoder.
    """
    is_pair = has_decoder(name, is_pair=is_pair)
    task: TrainingTask = "translation" if is_pair else "lm"
    for ending, own in _ENDINGS.items():
        if name.endswith(ending) and not (is_pair and own == "feature-extraction"):
            task = own
    return task


def training_task_of(checkpoint: Checkpoint) -> TrainingTask:
    """The task of a checkpoint's model."""
    from prunecli.modules.classes import model_class

    is_pair = not checkpoint.runs_stock or checkpoint.config.get("is_encoder_decoder") is True
    return task_of_class(model_class(checkpoint).__name__, is_pair=is_pair)


def task_of(checkpoint: Checkpoint) -> TaskName:
    """The task that a checkpoint's model is measured at: without a head, the vectors of texts."""
    task = training_task_of(checkpoint)
    return "embedding" if task == "feature-extraction" else task


def task_of_all(checkpoints: Sequence[Path]) -> TaskName:
    """The task that several checkpoints' models have in common.

    Raises:
        UsageError: not all for the same.
        CheckpointError: one of them is no checkpoint.
    """
    from prunecli.model.checkpoint import open_model

    paths: dict[TaskName, Path] = {}
    for path in checkpoints:
        with open_model(path) as checkpoint:
            paths.setdefault(task_of(checkpoint), path)
    if len(paths) > 1:
        (first, path), (second, other), *_ = paths.items()
        raise UsageError(f"{path} is for {first}, {other} for {second}", "Say with `task` what is measured.")
    return next(iter(paths))
