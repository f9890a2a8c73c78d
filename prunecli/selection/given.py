"""A selection that is not made but given: by a file that names the units to keep."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from prunecli.model.axes import Axis
from prunecli.model.decision import Decision, Origin
from prunecli.model.history import given, history_step
from prunecli.selection.saved import read_kept
from prunecli.selection.select import Kept, places_of
from prunecli.selection.selection import Selection

if TYPE_CHECKING:
    from prunecli.model.checkpoint import Checkpoint


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
