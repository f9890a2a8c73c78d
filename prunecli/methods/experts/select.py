"""Which experts to keep (2212.09811, 4.3): pure functions from metric values to ids.

Symbols: phi(e) is an expert's metric, normalised to sum 1 over the experts that its layer holds; in each
layer experts are sorted from most to least important, ties by id.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prunecli.errors import StatisticsError
from prunecli.methods.experts.budget import Request, axes_in, counts_by_part
from prunecli.model.axes import Axis
from prunecli.selection.select import Budget, Values, allotted, select

STEPS = 1000
"""The released code tries theta = 0.001, 0.002, ..., 1."""


def select_experts(
    axes: Sequence[Axis], values: Values, request: Request
) -> tuple[dict[str, tuple[int, ...]], dict[str, float]]:
    """Choose the experts to keep.

    Args:
        axes: experts of each sparse layer.
        values: name of the axis -> `[experts]`, their metric, in the order of `Axis.ids`.
        request: how many, by which algorithm.

    Returns:
        Name of each axis -> original ids that stay; theta of eq. 5 under `"model"`, or of each side (empty for
        per-layer).

    Raises:
        UsageError: the request leaves too few experts, or asks for more than there are.
        StatisticsError: a layer's experts have no tokens.
    """
    counts = counts_by_part(axes, request)
    phi = {axis.name: shares(axis, values[axis.name]) for axis in axes}
    thetas: dict[str, float] = {}
    if request.strategy != "per-layer":
        parts, counts = counts, {}
        for part, count in parts.items():
            own = axes_in(part, axes), phi, count, request.minimum
            found, thetas[part] = (
                released_threshold(*own) if request.released else threshold(*own, request.groups)
            )
            counts |= found
    return select(axes, values, Budget(keep=counts, groups=request.groups)), thetas


def shares(axis: Axis, values: NDArray[Any]) -> NDArray[np.float64]:
    """`[experts]`, phi of each expert.

    Raises:
        StatisticsError: no token reaches any expert that the layer holds.
    """
    importance = np.asarray(values, np.float64)
    total = importance.sum()
    if not 0 < total < np.inf:
        raise StatisticsError(
            f"{axis.module}: the statistics route no token to the experts that it holds.",
            "Collect the gates of this checkpoint, with these languages.",
        )
    return np.asarray(importance / total)


def threshold(
    axes: Sequence[Axis], phi: Values, count: int, minimum: int, groups: int = 1
) -> tuple[dict[str, int], float]:
    """Global threshold (eq. 5): sum_k max(minimum, min(n_k | sum_{i <= n_k} phi(e_ki) >= theta)) = count.

    An expert stays while the mass before it is below theta, so the `count` experts with the least mass before
    them stay, after the first `minimum` of each layer. Equal masses go by rank, then by layer: the count is
    exact. Where a router picks groups first, the experts of one rank within their groups stay or go together.

    Args:
        axes: at least one.
        phi: `shares` of each axis.
        count: experts to keep in these layers.
        minimum: experts to keep in each, too.
        groups: of like size, in each layer; the count is rounded down to a multiple of it.

    Returns:
        Name of each axis -> experts that stay; and theta: the least mass before a removed expert, or 1.
    """
    before: dict[str, NDArray[np.float64]] = {}
    for axis in axes:
        ranked = -np.sort(-phi[axis.name].reshape(groups, -1), axis=1)
        mass = np.cumsum(ranked.sum(axis=0))
        before[axis.name] = np.concatenate(([0.0], mass[:-1] / mass[-1]))  # 1 before experts of no importance
    removed = sum(len(axis.ids) for axis in axes) - count // groups * groups
    budget = Budget(count=removed, together=True, least=minimum, groups=groups)
    # Masses are equal in floating point where metrics are not, so that they tell how many stay, not which.
    counts = allotted(axes, {name: -np.tile(mass, groups) for name, mass in before.items()}, budget)
    after = [
        mass[counts[name] // groups] for name, mass in before.items() if counts[name] < groups * len(mass)
    ]
    return counts, float(min(after, default=1.0))


def released_threshold(
    axes: Sequence[Axis], phi: Values, count: int, minimum: int
) -> tuple[dict[str, int], float]:
    """The threshold as the authors' released code counts it, for statistics that they published.

    It differs from eq. 5 in three ways. The first `minimum` experts of a layer stay, and their mass is left out of
    the sum. Of the others those stay up to whom, themselves included, the mass is below theta. And theta is the first
    multiple of 0.001 that keeps at least `count`, which the layers then fill in order, so that the last ones get
    fewer. A layer whose mass lies on its first experts therefore keeps many more than by eq. 5.

    Args and Returns as for `threshold`; the published model has no groups.
    """
    first = {axis.name: min(minimum, len(axis.ids)) for axis in axes}
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
