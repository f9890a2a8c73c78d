"""From the trained model back to the checkpoint's own tensors, for the pipeline to write."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prunecli.model.checkpoint import Checkpoint, open_model
from prunecli.model.history import history_step, named
from prunecli.model.patchwork import module_name
from prunecli.modules.saving import save_tensors, stock_names
from prunecli.modules.stock_names import stored_tensors
from prunecli.tensors.dtypes import parse_dtype
from prunecli.tensors.stream import Copy, Output
from prunecli.tensors.writer import SINGLE_FILE
from prunecli.training.options import TrainingOptions
from prunecli.training.parts import merged_state

if TYPE_CHECKING:
    from prunecli.training.data import TrainingData


WITHOUT_WORDS = (("train", "all"), ("gradient_checkpointing", False), ("gradient_checkpointing", True))
"""Options that are not in the history: they say nothing."""


def stage(model: Any, source: Checkpoint, directory: Path) -> None:
    """Write the model's weights under `source`'s tensor names, in the types they were trained in, with its other files.

    A tensor that the model has no place for (of another class of the family) is left out.
    """
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    state = merged_state(model)
    if source.runs_stock:  # what the class does not run is as it was
        trained = stored_tensors(state, model, source)
    else:
        state = stock_names(state, source.mixtures)
        # A tied tensor is held once, under whichever of its names the model has.
        places = {name: name if name in state else module_name(model, name) for name in source.tensors}
        trained = {name: state[place] for name, place in places.items() if place in state}
    save_tensors(trained, directory / SINGLE_FILE)
    card = source.path / "README.md"
    for path in (
        *source.side_files.carried,
        source.path / "config.json",
        *([card] if card.is_file() else []),
    ):
        place = directory / path.relative_to(source.path)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, place)


def outputs_of(source: Checkpoint, trained: Checkpoint, dtype: str | None) -> tuple[Output, ...]:
    """Every tensor of the result, made of `trained`'s, in the type that `source` stores it in, or in `dtype`."""
    target = None if dtype is None else parse_dtype(dtype)
    return tuple(
        Output(name, source.info(name).cast(target).dtype, info.shape, Copy(name))
        for name, info in trained.tensors.items()
    )


def finetune_step(
    source: Checkpoint,
    config: Path | None,
    data: TrainingData,
    options: TrainingOptions,
    log: Mapping[str, Any],
) -> dict[str, Any]:
    """The entry for `Structure.history`; of a model from scratch `config` is what it was made of."""
    values = {
        key: value
        for key, value in options.values_of(TrainingOptions).items()
        if key not in ("loss", "device", "teacher", "minutes", "epochs", "steps", "patience")
        and value is not None
        and (key, value) not in WITHOUT_WORDS
    }
    arguments: dict[str, Any] = {
        **data.describe(),
        **values,
        **asdict(options.loss),
        "steps": log["steps"],
    }
    if log.get("best"):
        arguments["best"] = log["best"]["step"]
    if options.teacher is not None:
        with open_model(options.teacher) as teacher:
            arguments["teacher"] = named(teacher)
    if config is not None:
        arguments["from_scratch"] = source.model_type
    return history_step("finetune", source if config is None else None, arguments)
