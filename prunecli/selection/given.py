"""Selections given by a file: one that a pruning command printed with `--json`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prunecli.errors import StatisticsError
from prunecli.model.axes import Axis
from prunecli.selection.select import Kept, held_in
from prunecli.selection.selection import Selection, decision_of, selection_of
from prunecli.tensors.json_files import read_json
from prunecli.text.lines import near_names

if TYPE_CHECKING:
    from prunecli.model.checkpoint import Checkpoint


def read_kept(path: Path, axes: Sequence[Axis], content: Any = None) -> dict[str, tuple[int, ...]]:
    """Name of each of `axes` -> ids of the units that stay, in the order in which they are stored.

    Args:
        path: JSON with `{"kept": {NAME: [ids]}}`; NAME of the axis, or of the module that holds the units.
        content: content of the file, if the file has been read.

    Raises:
        StatisticsError: damaged, for a model with other axes, or with ids that this checkpoint does not hold.
    """
    content = read_json(path) if content is None else content
    saved = content.get("kept") if isinstance(content, dict) else None
    if not isinstance(saved, dict):
        raise StatisticsError(
            f'{path}: holds no ids under "kept".',
            "Give what a pruning command printed with --json; statistics go with --gates or --scores.",
        )
    short = {axis.module: axis.name for axis in axes}
    saved = {short.get(name, name): ids for name, ids in saved.items()}
    names = [axis.name for axis in axes]
    if stray := sorted(set(saved).symmetric_difference(names)):
        raise StatisticsError(
            f"{path}: a selection for another model: {stray[0]} is not in both.",
            near_names(stray[0], sorted(names if stray[0] in saved else saved), "In the other"),
        )
    for axis in axes:
        ids = saved[axis.name]
        if not isinstance(ids, list) or not all(type(number) is int for number in ids):
            raise StatisticsError(
                f"{path}: {axis.name!r} is not a list of ids.", "Print the selection again."
            )
        if absent := sorted(set(ids).difference(axis.ids)):
            raise StatisticsError(
                f"{path}: keeps {axis.kind} {absent[0]} of {axis.name}, which the checkpoint does not hold.",
                "Select from the original model.",
            )
    return {axis.name: tuple(filter(set(saved[axis.name]).__contains__, axis.ids)) for axis in axes}


def selection_of_file(
    command: str, checkpoint: Checkpoint, axes: Sequence[Axis], path: Path, dtype: str | None
) -> Selection:
    """The units that a file keeps, as `command` records them.

    Raises:
        StatisticsError: as `read_kept`.
    """
    kind, kept = axes[0].kind, read_kept(path, axes)
    decision = decision_of(axes, kept, how=f"named in {path.name}")
    noun = "Hidden units" if kind == "unit" else f"{kind}s".capitalize()
    arguments, reasons = {"removed": num_removed(axes, kept)}, (f"{noun} by {path}.",)
    return selection_of(command, checkpoint, axes, decision, arguments, (path,), dtype=dtype, reasons=reasons)


def num_removed(axes: Sequence[Axis], kept: Kept) -> int:
    """Number of units of `axes` that are not in `kept`."""
    return held_in(axes) - sum(len(kept[axis.name]) for axis in axes)
