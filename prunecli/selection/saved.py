"""The units to keep from a file: a selection that a pruning command printed with `--json`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prunecli.errors import StatisticsError
from prunecli.model.axes import Axis
from prunecli.tensors.json_files import read_json
from prunecli.text.lines import near_names


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
