"""Which units stay, and why: what every pruning method returns and `cut` carries out."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from prunecli.errors import StatisticsError
from prunecli.model.axes import Axis
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.decision import Decision, Ranked
from prunecli.model.history import given, history_step
from prunecli.selection.select import Budget, Kept, Values, held_in
from prunecli.tensors.json_files import read_json
from prunecli.text.files import near_names


@dataclass(frozen=True)
class Selection:
    """Which units stay, and why.

    Attributes:
        kept: name of an axis -> ids of the units that stay (see `Axis.ids`); an axis that is left out keeps all units.
        dtype: type of the result's floating-point tensors (`float16`, `F16`, …). If None, as stored.
        step: the entry for `Structure.history`.
        reasons: lines that say how the units were chosen.
        decision: the values that the units were chosen by. If None, nobody compared them.
        dropped: names of further tensors that are removed.
        settings: further keys of config.json that change (`text_config.top_k` in a nested one), and new values.
        files: side files that differ from the source's, by name. None: the file is left out.
        details: further fields that `--json` prints.
        warning: a line to show before anything is written.
        earlier: selections of other kinds of units that are carried out with this one, see `together`.
    """

    kept: Kept
    dtype: str | None = None
    step: Mapping[str, Any] = field(default_factory=dict)
    reasons: tuple[str, ...] = ()
    decision: Decision | None = None
    dropped: Collection[str] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, bytes | None] = field(default_factory=dict)
    details: Mapping[str, object] = field(default_factory=dict)
    warning: str | None = None
    earlier: tuple[Selection, ...] = ()


def together(selections: Sequence[Selection]) -> Selection:
    """One selection of several, of different kinds of units; the history has a step for each, in their order."""
    *earlier, last = selections

    def merged(name: str) -> dict[str, Any]:
        return {key: value for one in selections for key, value in getattr(one, name).items()}

    return Selection(
        merged("kept"),
        last.dtype,
        last.step,
        tuple(reason for one in selections for reason in one.reasons),
        last.decision,
        {name for one in selections for name in one.dropped},
        merged("settings"),
        merged("files"),
        merged("details"),
        earlier=tuple(earlier),
    )


def selection_of(
    command: str,
    checkpoint: Checkpoint,
    axes: Sequence[Axis],
    decision: Decision,
    arguments: Mapping[str, Any],
    files: Sequence[Path] = (),
    *,
    dtype: str | None,
    reasons: Sequence[str] = (),
    notes: Mapping[str, Any] = {},
    **more: Any,
) -> Selection:
    """The units that a decision keeps, with the history entry.

    Args:
        command: command that the history records.
        axes: the axes of the selection; an axis that the decision is not about keeps all units.
        arguments: options that the result depends on; those without a value are left out.
        files: statistics, or a saved selection, that decided.
        notes: further fields of the history entry.
        more: other fields of `Selection`.
    """
    step = history_step(command, checkpoint, given({**arguments, "dtype": dtype}), files, **notes)
    kept = {axis.name: decision.kept.get(axis.name, axis.ids) for axis in axes}
    return Selection(kept, dtype, step, tuple(reasons), decision.read_from(step), **more)


def decision_of(
    axes: Sequence[Axis],
    kept: Kept,
    values: Values | None = None,
    budget: Budget | None = None,
    *,
    alone: Mapping[str, Kept] = {},
    tokens: Mapping[str, int] = {},
    metrics: Mapping[str, str] = {},
    **fields: Any,
) -> Decision:
    """The units of `axes` with the values that they were compared by.

    Args:
        axes: the axes that units were chosen from.
        kept: which units stay.
        values: their values. If None, they were compared by nothing.
        budget: the budget, whose words are `how` and `least` of the decision.
        alone: language or text -> units that would stay for it alone, on the axes where it counts.
        tokens: name of an axis -> number of tokens that its values were measured on.
        metrics: name of an axis -> its metric, if another one than that of the decision.
        fields: other fields of `Decision`.
    """
    kind, places, groups = axes[0].kind, [], 1 if budget is None else budget.groups
    if budget is not None and values is not None:
        fields["how"], fields["least"] = budget.words(kind)
    cut = f"{kind}s" if budget is not None and budget.ranks_all else ""
    for axis in axes:
        size = axis.count // groups
        for group in range(groups):
            own = slice(group * size, (group + 1) * size)
            places.append(
                Ranked.of(
                    (axis.name, axis.side, axis.layer),
                    axis.ids[own],
                    kept[axis.name],
                    None if values is None else np.asarray(values[axis.name])[own],
                    attention=axis.attention,
                    tokens=tokens.get(axis.name),
                    metric=metrics.get(axis.name, ""),
                    cut=f"{axis.name}, group {group}" if groups > 1 else cut,
                    alone={
                        text: np.isin(sorted(axis.ids[own]), of_text[axis.name])
                        for text, of_text in alone.items()
                        if axis.name in of_text
                    },
                )
            )
    return Decision(kind, tuple(places), **fields)


def read_kept(path: Path, axes: Sequence[Axis], content: Any = None) -> Kept:
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
            "Give what a pruning command printed with --json; statistics go with `gates` or `scores`.",
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


def num_removed(axes: Sequence[Axis], kept: Kept) -> int:
    """Number of units of `axes` that are not in `kept`."""
    return held_in(axes) - sum(len(kept[axis.name]) for axis in axes)
