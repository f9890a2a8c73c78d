"""What a model is for: its task, by the class that its checkpoint names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar, get_args

from prunecli.errors import UnsupportedModelError, UsageError

if TYPE_CHECKING:
    from prunecli.model.checkpoint import Checkpoint

TaskName = Literal["translation", "classification", "mlm", "lm"]
"""What a model can be measured at."""
TASKS: tuple[TaskName, ...] = get_args(TaskName)
MeasuredTask = Literal[TaskName, "embedding"]
"""What `evaluate` measures: vectors of texts too, which need no head."""
TrainingTask = Literal[TaskName, "feature-extraction"]
"""What a model can be trained for."""
Task = TypeVar("Task", bound=str)

_ENDINGS: Mapping[str, TrainingTask] = {
    "Model": "feature-extraction",
    "LMHeadModel": "lm",
    "ForSequenceClassification": "classification",
    "ForMaskedLM": "mlm",
}
"""Of a class -> what it is for; the longer of two endings last. An encoder with a decoder translates without a head."""


def task_of_class(name: str, *, is_pair: bool) -> TrainingTask:
    """What a class of transformers is for.

    Args:
        is_pair: whether it is an encoder with a decoder.
    """
    task: TrainingTask = "translation" if is_pair else "lm"
    for ending, own in _ENDINGS.items():
        if name.endswith(ending) and not (is_pair and own == "feature-extraction"):
            task = own
    return task


def training_task_of(checkpoint: Checkpoint) -> TrainingTask:
    """What a checkpoint's model is for, of a declared family or not."""
    if checkpoint.architecture is None:
        is_pair = checkpoint.config.get("is_encoder_decoder") is True
    else:
        is_pair = len(checkpoint.architecture.stacks) > 1
    return task_of_class(_class_name(checkpoint), is_pair=is_pair)


def task_of(checkpoint: Checkpoint) -> TaskName:
    """What a checkpoint's model can be measured at.

    Raises:
        UnsupportedModelError: it has no head.
    """
    task = training_task_of(checkpoint)
    if task == "feature-extraction":
        raise UnsupportedModelError(
            f"{checkpoint.path}: {_class_name(checkpoint)} has no head, so there is no score and no loss of it",
            "Name a checkpoint with a head; evaluate, compare-models and finetune do without one.",
        )
    return task


def measured_task_of(checkpoint: Checkpoint) -> MeasuredTask:
    """What a checkpoint's model is for, one without a head for the vectors of texts."""
    task = training_task_of(checkpoint)
    return "embedding" if task == "feature-extraction" else task


def task_of_all(checkpoints: Sequence[Path], of: Callable[[Checkpoint], Task]) -> Task:
    """What several checkpoints' models are for.

    Args:
        of: says it of one: `task_of`, `measured_task_of`.

    Raises:
        UsageError: not all for the same.
        CheckpointError: one of them is no checkpoint.
    """
    from prunecli.model.checkpoint import open_model

    paths: dict[Task, Path] = {}
    for path in checkpoints:
        with open_model(path) as checkpoint:
            paths.setdefault(of(checkpoint), path)
    if len(paths) > 1:
        (first, path), (second, other), *_ = paths.items()
        raise UsageError(f"{path} is for {first}, {other} for {second}", "Say with --task what is measured.")
    return next(iter(paths))


def _class_name(checkpoint: Checkpoint) -> str:
    from prunecli.model.declared import class_names
    from prunecli.modules.building import model_class

    if checkpoint.architecture is None:
        return next(iter(class_names(checkpoint.config)), "")
    return str(model_class(checkpoint).__name__)
