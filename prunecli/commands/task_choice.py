"""The task of a command: as asked, or else what the model's class is for; options of other tasks are refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prunecli.errors import UnsupportedModelError, UsageError

if TYPE_CHECKING:
    from prunecli.evaluation.losses import TaskName
    from prunecli.model.checkpoint import Checkpoint
    from prunecli.training.features import TrainingTask


class TaskChoice(str, Enum):
    """Values of --task."""

    translation = "translation"
    lm = "lm"
    mlm = "mlm"
    classification = "classification"


class TrainingTaskChoice(str, Enum):
    """Values of --task of `finetune`."""

    translation = "translation"
    lm = "lm"
    mlm = "mlm"
    classification = "classification"
    features = "feature-extraction"


TaskOption = Annotated[
    TaskChoice | None,
    typer.Option("--task", help="What for; default: what the model is for.", show_default=False),
]

TrainingTaskOption = Annotated[
    TrainingTaskChoice | None,
    typer.Option("--task", help="What for; default: what the model is for.", show_default=False),
]

_ENDINGS: Mapping[str, TrainingTask] = {
    "Model": "feature-extraction",
    "LMHeadModel": "lm",
    "ForSequenceClassification": "classification",
    "ForMaskedLM": "mlm",
}
"""Of a class -> what it is for; the longer of two endings last. An encoder with a decoder translates without a head."""
_PLAIN: tuple[TaskName, ...] = ("mlm", "lm")
OPTIONS: Mapping[str, tuple[TaskName, ...]] = {
    **dict.fromkeys(("--data", "--source-file", "--target-file", "--langs", "--pairs"), ("translation",)),
    **dict.fromkeys(("--valid-split", "--spm", "--hypotheses"), ("translation",)),
    **dict.fromkeys(("--labelled", "--valid-labelled"), ("classification",)),
    **dict.fromkeys(("--text", "--valid-text", "--whole-files", "--context"), _PLAIN),
    "--groups": ("translation",),
    "--memory": _PLAIN,
    "--stride": ("lm",),
}
"""Option -> the tasks that it goes with."""
NEEDS: Mapping[TrainingTask, str] = {
    "translation": "Give --data DIR, or --source-file, --target-file and --pairs.",
    "classification": "Give --labelled FILE: label<TAB>text on every line, or JSON lines.",
    "mlm": "Give --text FILE, one text a line.",
    "lm": "Give --text FILE, one text a line.",
    "feature-extraction": "Give --text FILE, one text a line.",
}
"""Task -> the text that it needs."""


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
    return task_of_class(_class_name(checkpoint), is_pair=_is_pair(checkpoint))


def task_of(checkpoint: Checkpoint) -> TaskName:
    """What a checkpoint's model can be measured at.

    Raises:
        UnsupportedModelError: it has no head.
    """
    task = training_task_of(checkpoint)
    if task == "feature-extraction":
        raise UnsupportedModelError(
            f"{checkpoint.path}: {_class_name(checkpoint)} has no head, so there is no score and no loss of it",
            "Name a checkpoint with a head; compare-models and finetune do without one.",
        )
    return task


def _class_name(checkpoint: Checkpoint) -> str:
    from prunecli.model.declared import class_names
    from prunecli.modules.building import model_class

    if checkpoint.architecture is None:
        return next(iter(class_names(checkpoint.config)), "")
    return str(model_class(checkpoint).__name__)


def _is_pair(checkpoint: Checkpoint) -> bool:
    if checkpoint.architecture is None:
        return checkpoint.config.get("is_encoder_decoder") is True
    return len(checkpoint.architecture.stacks) > 1


def task_of_all(checkpoints: Sequence[Path]) -> TaskName:
    """What several checkpoints' models are for.

    Raises:
        UsageError: not all for the same.
        CheckpointError: one of them is no checkpoint.
    """
    from prunecli.model.checkpoint import open_model

    found: dict[TaskName, Path] = {}
    for path in checkpoints:
        with open_model(path) as checkpoint:
            found.setdefault(task_of(checkpoint), path)
    if len(found) > 1:
        (first, one), (second, other), *_ = found.items()
        raise UsageError(f"{one} is for {first}, {other} for {second}", "Say with --task what is measured.")
    return next(iter(found))


def check_options(
    task: TrainingTask, given: Mapping[str, bool], *, also_plain: tuple[TrainingTask, ...] = ()
) -> None:
    """Refuse options of other tasks, and a task without its text.

    Args:
        given: option -> whether it was.
        also_plain: tasks that take plain text beside those of language models.

    Raises:
        UsageError: text of another task is given, or that of this one is missing.
    """
    for name, is_given in given.items():
        tasks = (*OPTIONS[name], *(also_plain if OPTIONS[name] == _PLAIN else ()))
        if is_given and task not in tasks:
            raise UsageError(f"{name} goes with --task {' or '.join(tasks)}, not {task}", NEEDS[task])
    if task in (*_PLAIN, *also_plain) and not given.get("--text"):
        raise UsageError(f"{task} needs text", NEEDS[task])
    if task == "classification" and not given.get("--labelled"):
        raise UsageError("classification needs labels", NEEDS[task])
