"""How many units of each axis stay, and which: pure functions of the units' values.

Within an axis the units of the highest values stay; of equal values the first. A `Budget` says how many. The algorithms
of 2212.09811, 4.3, are budgets with a `balance`.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from prunecli.errors import StatisticsError, UsageError
from prunecli.model.axes import Axis
from prunecli.model.decision import Floats
from prunecli.tensors.quantities import exact_share

Values = Mapping[str, Floats]
"""Name of an axis -> `[units]`, in the order of `Axis.ids`: the more a unit matters, the higher."""
Kept = Mapping[str, Sequence[int]]
"""Name of an axis -> ids of the units that stay."""
HOLDERS = {
    "expert": "layer",
    "head": "attention",
    "unit": "FFN",
    "layer": "stack",
    "token": "vocabulary",
    "channel": "model",
}
"""Kind of units -> what holds them, in words."""
UNBOUNDED = 1 << 40
"""A number of decoder units for which every axis is full, whatever the balance."""
STEPS = 1000
"""The released code tries theta = 0.001, 0.002, ..., 1."""


@dataclass(frozen=True)
class Budget:
    """How many units are removed, and from where.

    Attributes:
        ratio: fraction of the units to remove, rounded up.
        count: number of units to remove from all axes together.
        keep: name of an axis, or a side -> number of units that the axis, or each axis of the side, keeps; instead of
            `ratio` and `count`.
        scope: axes that share one number of units to remove: each "axis" alone, all of a "side", or all of the "model".
        balance: encoder units that stay for each decoder unit. If None, every axis loses the same fraction, or the
            units of the model are ranked by their values. If given, all axes of a side keep the same number of units;
            in the scopes "side" and "model" as many as have less than theta of their axis' mass before them (eq. 5).
        least: number of units that each axis keeps at least.
        multiple: an axis that loses units keeps a multiple of it, the next lower but for `least`.
        even: numbers of units, of which every axis keeps the largest that removes enough. If None, any number.
        groups: runs of equal length that the units of an axis lie in, of which each keeps the same number; with a
            balance a divisor of `multiple`.
        released: count thresholds as the code does that the authors of 2212.09811 released.
    """

    ratio: float | None = None
    count: int | None = None
    keep: Mapping[str, int] | None = None
    scope: Literal["axis", "side", "model"] = "axis"
    balance: Fraction | None = None
    least: int = 0
    multiple: int = 1
    even: tuple[int, ...] | None = None
    groups: int = 1
    released: bool = False

    def removed(self, axes: Sequence[Axis]) -> int:
        """Number of units of these axes to remove.

        Raises:
            UsageError: the ratio is outside [0, 1).
        """
        if self.count is not None or self.ratio is None:
            return self.count or 0
        return ceil(exact_share(self.ratio, f"{axes[0].kind}s", 0.25) * held_in(axes))

    def removable(self, axes: Sequence[Axis]) -> int:
        """Number of units to remove, if these axes can lose so many.

        Raises:
            UsageError: they cannot.
        """
        kind, removed = axes[0].kind, self.removed(axes)
        free = sum(max(axis.count - self.least, 0) for axis in axes)
        if not 0 <= removed <= free:
            bound = f", of which each keeps {self.least}" if self.least else ""
            raise UsageError(
                f"{removed} {kind}s would be removed; {len(axes)} axes hold {held_in(axes)}{bound}: at most {free} "
                "can.",
                f"Remove fewer {kind}s.",
            )
        return removed

    @property
    def ranks_all(self) -> bool:
        """Whether the units of all axes are compared with each other by their values."""
        return self.scope == "model" and self.balance is None and self.even is None and self.keep is None

    def words(self, kind: str) -> tuple[str, str]:
        """Which units stay; and why some may stay below the cut-off ("": none can)."""
        holder = HOLDERS[kind]
        least = f"each {holder} keeps at least {self.least}" if self.least and self.scope != "axis" else ""
        each = f"group of each {holder}" if self.groups > 1 else holder
        return (
            f"the lowest of all {kind}s are removed"
            if self.ranks_all
            else f"the highest of each {each} are kept",
            least,
        )

    def parts(self, axes: Sequence[Axis]) -> dict[str, list[Axis]]:
        """Name of an axis, a side or "model" -> the axes that share one number of units."""
        found: dict[str, list[Axis]] = {}
        for axis in axes:
            found.setdefault({"axis": axis.name, "side": axis.side, "model": "model"}[self.scope], []).append(
                axis
            )
        return found

    def lowest(self, axes: Sequence[Axis]) -> int:
        """The smallest number of units that these axes can keep: `least` of each, or all, in multiples."""
        step = self.multiple
        return sum(min(ceil(self.least / step), axis.count // step) * step for axis in axes)

    def shared_out(self, axes: Sequence[Axis]) -> dict[str, int]:
        """Number of units that each of `parts` keeps, by the balance.

        The number d of decoder units is the largest that fits. Encoder axes keep floor(balance x d); an encoder's whole
        side floor(balance x L_enc / L_dec x d), L counting axes. A part that would exceed its axes, or fall below the
        minimum, stops there and the other side gets the rest. A model with one side has no balance to keep.

        Raises:
            UsageError: the budget leaves too few units, or asks for more than there are.
        """
        parts, step = self.parts(axes), self.multiple
        if self.keep is not None:
            if self.scope == "model":
                raise UsageError(
                    "`strategy=global-threshold` takes one count for the whole model, not `experts_per_layer`.",
                    "Give `ratio` or `fit`, or `strategy=side-threshold`.",
                )
            for side, count in self.keep.items():
                most = max((axis.count for axis in axes if axis.side == side), default=count)
                if count % step or not self.least <= count <= most:
                    raise UsageError(
                        f"`experts_per_layer` asks for {count} in each {side} layer: it must be a multiple of {step}, "
                        f"from {self.least} to {most}.",
                        "The router needs so many, in groups of equal size; see `multiple_of`.",
                    )
            return {
                name: sum(min(self.keep[axis.side], axis.count) for axis in own)
                for name, own in parts.items()
            }
        keep = max(held_in(axes) - self.removed(axes), 0)
        self._check_feasible(axes, keep)
        has_sides = len({own[0].side for own in parts.values()}) == 2
        bounds = {  # units of the part for each unit of a decoder's part; units at least and at most
            name: (
                Fraction(len(own), len(parts.get("decoder", own)))
                * (self.balance or 1 if has_sides and own[0].side == "encoder" else 1),
                self.lowest(own),
                sum(axis.count // step * step for axis in own),
            )
            for name, own in parts.items()
        }

        def counts(decoder: int) -> dict[str, int]:
            return {
                name: min(most, max(least, floor(scale * decoder) // step * step))
                for name, (scale, least, most) in bounds.items()
            }

        return counts(bisect_right(range(UNBOUNDED), keep, key=lambda d: sum(counts(d).values())) - 1)

    def _check_feasible(self, axes: Sequence[Axis], keep: int) -> None:
        """Refuse to keep only `keep` units if the axes need more, with the arithmetic."""
        step, held, lowest, kind = self.multiple, held_in(axes), self.lowest(axes), axes[0].kind
        minimum = ceil(self.least / step) * step
        for axis in axes if self.scope == "axis" and step > 1 else ():
            if axis.count < minimum:
                raise UsageError(
                    f"{axis.module} holds {axis.count} {kind}s: no multiple of {step} lies between the "
                    f"{minimum - step + 1} or more that are needed and those.",
                    "Give a smaller `multiple_of`, or none.",
                )
        if keep < lowest:
            raise UsageError(
                f"{keep} of {held} {kind}s would be kept: fewer than {minimum} in each of {len(axes)} sparse layers "
                f"({lowest} in all).",
                f"Remove at most {floor((1 - Fraction(lowest, held)) * 1000) / 10:g}% (`ratio`); `least` can be as low "
                "as the number of experts that the router picks for each token.",
            )


def held_in(axes: Iterable[Axis]) -> int:
    """Number of units that the axes hold."""
    return sum(axis.count for axis in axes)


def select(axes: Sequence[Axis], values: Values, budget: Budget) -> tuple[Kept, dict[str, float]]:
    """Name of each axis -> ids of the units that stay, in the order of `Axis.ids`; and thresholds, if there are any.

    These are theta of eq. 5 under "model" or of each side.

    Raises:
        UsageError: a budget that these axes cannot meet.
        StatisticsError: with a balance, an axis whose values do not add up to a positive number.
    """
    thetas = {}
    if budget.balance is None:
        counts = allotted(axes, values, budget)
    else:
        counts = budget.shared_out(axes)
        phi = {axis.name: shares(axis, values[axis.name]) for axis in axes}
        for part, own in budget.parts(axes).items() if budget.scope != "axis" else ():
            if budget.released:
                found, thetas[part] = released_threshold(own, phi, counts[part], budget.least)
            else:
                found, thetas[part] = threshold(own, phi, counts[part], budget.least, budget.groups)
            counts |= found
    kept = {axis.name: best(axis, values[axis.name], counts[axis.name], budget.groups) for axis in axes}
    return kept, thetas


def allotted(axes: Sequence[Axis], values: Values, budget: Budget) -> dict[str, int]:
    """Name of each axis -> number of its units that stay, under a budget without a balance.

    Raises:
        UsageError: as `select`.
    """
    held = {axis.name: axis.count for axis in axes}
    if budget.keep is not None:
        return {name: min(budget.keep[name], number) for name, number in held.items()}
    if budget.even is not None:
        most = min(*held.values(), (held_in(axes) - budget.removable(axes)) // len(axes))
        least = max(budget.least, 1)
        able = [number for number in budget.even if least <= number <= most]
        if not able:
            choices = ", ".join(map(str, budget.even)) or "none"
            raise UsageError(
                f"`uniform`: at most {most} {axes[0].kind}s may be kept in each layer, and at least {least} have to; "
                f"a stock model may keep {choices}.",
                f"Remove fewer {axes[0].kind}s, lower `least`, or leave `uniform` out.",
            )
        counts = dict.fromkeys(held, max(able))
    elif budget.scope == "model":
        # Rank the units of all axes by value, then by rank in their own axis, then by axis; the last ones go.
        rank = np.concatenate([ranks(values[axis.name], budget.groups) for axis in axes])
        flat = np.concatenate([np.asarray(values[axis.name], np.float64) for axis in axes])
        number = np.repeat(np.arange(len(axes)), [*held.values()])
        safe = rank < -(-budget.least // budget.groups)
        order = np.lexsort((number, rank, -flat, ~safe))
        stays = number[order[: len(order) - budget.removable(axes)]]
        counts = dict(zip(held, np.bincount(stays, minlength=len(axes)).tolist(), strict=True))
    else:
        counts = {axis.name: held[axis.name] - budget.removed([axis]) for axis in axes}
    step = budget.multiple
    least = -(-budget.least // step) * step
    return {
        name: min(number, max(counts[name] // step * step, least)) if counts[name] < number else number
        for name, number in held.items()
    }


def best(axis: Axis, values: Floats, count: int, groups: int = 1) -> tuple[int, ...]:
    """The `count` units of the highest values, the same number of each group, in the order of `Axis.ids`.

    The groups divide the units, or the model would not have opened, and the count: see `Budget.groups`.
    """
    chosen = ranks(values, groups) < count // groups
    return tuple(np.asarray(axis.ids, np.int64)[chosen].tolist())


def ranks(values: Floats, groups: int = 1) -> NDArray[np.int64]:
    """`[units]`: number of units of its group that come before a unit; groups are runs of equal length."""
    by_group = np.asarray(values, np.float64).reshape(groups, -1)
    order = np.argsort(-by_group, axis=1, kind="stable")
    return np.argsort(order, axis=1, kind="stable").reshape(-1)


def shares(axis: Axis, values: Floats) -> Floats:
    """`[units]`, phi: the values divided by their sum.

    Raises:
        StatisticsError: the sum is not positive: no token reaches any expert that the layer holds.
    """
    importance = np.asarray(values, np.float64)
    total = importance.sum()
    if not 0 < total < np.inf:
        raise StatisticsError(
            f"{axis.module}: the statistics route no token to the {axis.kind}s that it holds.",
            "Collect the gates of this checkpoint, with these languages.",
        )
    return np.asarray(importance / total)


def threshold(
    axes: Sequence[Axis], phi: Values, count: int, minimum: int, groups: int = 1
) -> tuple[dict[str, int], float]:
    """Global threshold (eq. 5): sum_k max(minimum, min(n_k | sum_{i <= n_k} phi(e_ki) >= theta)) = count.

    A unit stays while the mass before it is below theta, so the `count` units with the least mass before them stay,
    after the first `minimum` of each axis. Equal masses go by rank, then by axis: the count is exact. If a router picks
    groups first, the units of one rank within their groups stay or go together.

    Args:
        axes: at least one.
        phi: `shares` of each axis.
        count: units to keep in these axes.
        minimum: units to keep in each axis, too.
        groups: number of groups of equal size in each axis; the count is rounded down to a multiple of it.

    Returns:
        Name of each axis -> number of units that stay; and theta: the least mass before a removed unit, or 1.
    """
    before = {}
    for axis in axes:
        ranked = -np.sort(-phi[axis.name].reshape(groups, -1), axis=1)
        mass = np.cumsum(ranked.sum(axis=0))
        before[axis.name] = np.concatenate(([0.0], mass[:-1] / mass[-1]))  # 1 before units of no importance
    removed = held_in(axes) - count // groups * groups
    budget = Budget(count=removed, scope="model", least=minimum, groups=groups)
    # Masses can be equal in floating point where values are not: they say how many units stay, not which.
    counts = allotted(axes, {name: -np.tile(mass, groups) for name, mass in before.items()}, budget)
    after = [
        mass[counts[name] // groups] for name, mass in before.items() if counts[name] < groups * len(mass)
    ]
    return counts, float(min(after, default=1.0))


def released_threshold(
    axes: Sequence[Axis], phi: Values, count: int, minimum: int
) -> tuple[dict[str, int], float]:
    """The threshold as the authors' released code counts it, for statistics that they published.

    It differs from eq. 5 in three ways. The first `minimum` units of an axis stay, and their mass is left out of the
    sum. A later unit stays if the mass up to and including it is below theta. And theta is the first multiple of 0.001
    that keeps at least `count`, which the axes then fill in order, so that the last ones get fewer. An axis whose mass
    lies on its first units therefore keeps many more than by eq. 5.

    Args and Returns as for `threshold`; the published model has no groups.
    """
    first = {axis.name: min(minimum, axis.count) for axis in axes}
    masses = [np.cumsum(-np.sort(-phi[name])[least:]) for name, least in first.items()]
    for step in range(1, STEPS + 1):
        theta = step / STEPS
        below = [int((mass < theta).sum()) for mass in masses]
        if sum(first.values()) + sum(below) >= count:
            break
    counts, left = {}, count - sum(first.values())
    for (name, least), more in zip(first.items(), below, strict=True):
        counts[name] = least + min(more, left)
        left -= counts[name] - least
    return counts, theta
