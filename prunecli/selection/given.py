"""Selections given by a file: one that a pruning command printed with `--json`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prunecli.errors import StatisticsError
from prunecli.model.axes import Axis
from prunecli.model.decision import Decision, Origin
from prunecli.model.history import given, history_step
from prunecli.selection.select import Kept, places_of
from prunecli.selection.selection import Selection
from prunecli.tensors.json_files import read_json
from prunecli.text.files import near_names

if TYPE_CHECKING:
    from prunecli.model.checkpoint import Checkpoint


def read_kept(path: Path, axes: Sequence[Axis], content: Any = None) -> dict[str, tuple[int, ...]]:
    """Name of each of `axes` -> ids that stay, in the order in which they are stored.

    Args:
        path: JSON with `{"kept": {NAME: [ids]}}`; NAME of the axis, or of what it belongs to.
        content: of the file, where it has been read.

    Raises:
        StatisticsError: damaged, for a model with other axes, or ids that this one does not hold.
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
    kept = {}
    for axis in axes:
        ids = saved[axis.name]
        if not isinstance(ids, list) or not all(type(number) is int for number in ids):
            raise StatisticsError(
                f"{path}: {axis.name!r} is not a list of ids.", "Print the selection again."
            )
        wanted = set(ids)
        if absent := sorted(wanted.difference(axis.ids)):
            raise StatisticsError(
                f"{path}: keeps {axis.kind} {absent[0]} of {axis.name}, which the checkpoint does not hold.",
                "Select from the original model.",
            )
        kept[axis.name] = tuple(number for number in axis.ids if number in wanted)
    return kept


def selection_of_file(
    command: str, checkpoint: Checkpoint, axes: Sequence[Axis], path: Path, dtype: str | None
) -> Selection:
    """The units that a file keeps, as `command` records them.

    Raises:
        StatisticsError: as `read_kept`.
    """
    kind, kept = axes[0].kind, read_kept(path, axes)
    arguments = given({"removed": num_removed(axes, kept), "dtype": dtype})
    step = history_step(command, checkpoint, arguments, (path,))
    origin = Origin().read_from(step)
    decision = Decision(
        kind, places_of(axes, kept, cut=f"{kind}s"), how=f"named in {path.name}", origin=origin
    )
    noun = "Hidden units" if kind == "unit" else f"{kind}s".capitalize()
    return Selection(kept, dtype, step, (f"{noun} by {path}.",), decision)


def num_removed(axes: Sequence[Axis], kept: Kept) -> int:
    """Number of units of `axes` that are not in `kept`."""
    return sum(len(axis.ids) - len(kept[axis.name]) for axis in axes)
