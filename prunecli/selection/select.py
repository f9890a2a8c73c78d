"""How many units of each axis stay, and which: pure functions of the units' values.

Of an axis always those of the highest values stay; a budget says how many. Of equal values the first stay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prunecli.errors import UsageError
from prunecli.model.axes import Axis
from prunecli.model.decision import Ranked
from prunecli.tensors.quantities import exact_share

Values = Mapping[str, NDArray[Any]]
"""Name of an axis -> `[units]`, in the order of `Axis.ids`: the more a unit matters, the higher."""
Kept = Mapping[str, Sequence[int]]
"""Name of an axis -> ids of the units that stay."""


@dataclass(frozen=True)
class Budget:
    """How many units go, and from where. One of `ratio`, `count` and `keep` is given.

    Attributes:
        ratio: fraction of the units that goes, never less.
        count: units of all axes that go.
        keep: name of an axis -> units that stay.
        together: whether the units of all axes are ranked together; else each axis loses the same part.
        least: units that each axis keeps at least.
        multiple: an axis that loses units keeps a multiple of it, the next lower but for `least`.
        even: every axis keeps the same number of units, the largest of these that removes enough; None: any number.
        groups: runs of equal length that the units of an axis lie in, of which each keeps as many.
    """

    ratio: float | None = None
    count: int | None = None
    keep: Mapping[str, int] | None = None
    together: bool = False
    least: int = 0
    multiple: int = 1
    even: tuple[int, ...] | None = None
    groups: int = 1

    def removed(self, axes: Sequence[Axis]) -> int:
        """How many units of these axes would go.

        Raises:
            UsageError: the ratio is outside [0, 1).
        """
        if self.count is not None or self.ratio is None:
            return self.count or 0
        share = exact_share(self.ratio, f"{axes[0].kind}s", 0.25)
        return ceil(share * sum(len(axis.ids) for axis in axes))

    def removable(self, axes: Sequence[Axis]) -> int:
        """`removed`, if so many may go.

        Raises:
            UsageError: more go than may.
        """
        held, kind, removed = sum(len(axis.ids) for axis in axes), axes[0].kind, self.removed(axes)
        free = sum(max(len(axis.ids) - self.least, 0) for axis in axes)
        if not 0 <= removed <= free:
            bound = f", of which each keeps {self.least}" if self.least else ""
            raise UsageError(
                f"{removed} {kind}s would go; {len(axes)} axes hold {held}{bound}: at most {free} can.",
                f"Remove fewer {kind}s.",
            )
        return removed


def select(axes: Sequence[Axis], values: Values, budget: Budget) -> dict[str, tuple[int, ...]]:
    """Name of each axis -> ids that stay, in the order of `Axis.ids`.

    Raises:
        UsageError: a budget that these axes cannot meet.
    """
    counts = allotted(axes, values, budget)
    return {axis.name: best(axis, values[axis.name], counts[axis.name], budget.groups) for axis in axes}


def allotted(axes: Sequence[Axis], values: Values, budget: Budget) -> dict[str, int]:
    """Name of each axis -> how many of its units stay.

    Raises:
        UsageError: as `select`.
    """
    held = {axis.name: len(axis.ids) for axis in axes}
    if budget.keep is not None:
        return {name: min(budget.keep[name], number) for name, number in held.items()}
    if budget.even is not None:
        counts = dict.fromkeys(held, _even(axes, budget))
    elif budget.together:
        counts = _ranked_together(axes, values, budget)
    else:
        counts = {axis.name: held[axis.name] - budget.removed([axis]) for axis in axes}
    step = budget.multiple
    least = -(-budget.least // step) * step
    return {
        name: min(number, max(counts[name] // step * step, least)) if counts[name] < number else number
        for name, number in held.items()
    }


def best(axis: Axis, values: NDArray[Any], count: int, groups: int = 1) -> tuple[int, ...]:
    """The `count` units of the highest values, as many of each group, in the order of `Axis.ids`.

    Raises:
        UsageError: the groups do not divide the units, or the count.
    """
    held = len(axis.ids)
    if held % groups or count % groups:
        raise UsageError(
            f"{axis.name}: {groups} groups divide not both the {held} {axis.kind}s that it holds and the "
            f"{count} to keep.",
            f"Keep a multiple of {groups} in each layer.",
        )
    chosen = ranks(values, groups) < count // groups
    return tuple(np.asarray(axis.ids, np.int64)[chosen].tolist())


def ranks(values: NDArray[Any], groups: int = 1) -> NDArray[np.int64]:
    """`[units]`: how many units of its group a unit comes after; groups are runs of equal length."""
    by_group = np.asarray(values, np.float64).reshape(groups, -1)
    order = np.argsort(-by_group, axis=1, kind="stable")
    return np.argsort(order, axis=1, kind="stable").reshape(-1)


def _ranked_together(axes: Sequence[Axis], values: Values, budget: Budget) -> dict[str, int]:
    """Units of all axes by value, then by rank in their own axis, then by axis; the last go, where they may."""
    own = [ranks(values[axis.name], budget.groups) for axis in axes]
    flat = np.concatenate([np.asarray(values[axis.name], np.float64) for axis in axes])
    rank, number = np.concatenate(own), np.repeat(np.arange(len(axes)), [len(axis.ids) for axis in axes])
    safe = rank < -(-budget.least // budget.groups)
    order = np.lexsort((number, rank, -flat, ~safe))
    stays = number[order[: len(order) - budget.removable(axes)]]
    counts = np.bincount(stays, minlength=len(axes)).tolist()
    return {axis.name: count for axis, count in zip(axes, counts, strict=True)}


def _even(axes: Sequence[Axis], budget: Budget) -> int:
    """How many units each axis keeps, so that all keep as many and enough go."""
    held = [len(axis.ids) for axis in axes]
    most = min(*held, (sum(held) - budget.removable(axes)) // len(held))
    least = max(budget.least, 1)
    able = [number for number in budget.even or () if least <= number <= most]
    if not able:
        choices = ", ".join(map(str, budget.even or ())) or "none"
        raise UsageError(
            f"--uniform: at most {most} {axes[0].kind}s may stay in each layer, and at least {least} have to; "
            f"a stock model may keep {choices}.",
            f"Remove fewer {axes[0].kind}s, lower --min, or leave --uniform out.",
        )
    return max(able)


def places_of(
    axes: Sequence[Axis],
    kept: Kept,
    values: Values | None = None,
    *,
    cut: str = "",
    groups: int = 1,
    alone: Mapping[str, Kept] | None = None,
    tokens: Mapping[str, int] | None = None,
) -> tuple[Ranked, ...]:
    """The units that were up for a choice, axis by axis or group by group, with what they were compared by.

    Args:
        axes: that the choice was among.
        kept: which units stay.
        values: None: they were compared by nothing.
        cut: what all axes are compared under; "": each is compared alone.
        groups: of each axis.
        tokens: name of an axis -> tokens that its values were measured on.
        alone: language or text -> the units that would stay for it alone, of the axes where it counts.
    """
    places = []
    for axis in axes:
        size = len(axis.ids) // groups
        for group in range(groups):
            own = slice(group * size, (group + 1) * size)
            places.append(
                Ranked.of(
                    (axis.name, axis.side, axis.layer),
                    axis.ids[own],
                    kept[axis.name],
                    None if values is None else np.asarray(values[axis.name])[own],
                    attention=axis.attention,
                    tokens=(tokens or {}).get(axis.name),
                    cut=f"{axis.name}, group {group}" if groups > 1 else cut,
                    alone={
                        text: np.isin(sorted(axis.ids[own]), of_text[axis.name])
                        for text, of_text in (alone or {}).items()
                        if axis.name in of_text
                    },
                )
            )
    return tuple(places)
