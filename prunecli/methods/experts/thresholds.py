"""Thresholds on the share of importance that a layer keeps (2212.09811, 4.3): by eq. 5, and as released code counts.

Symbols: phi(e) is an expert's metric, normalised to sum 1 over the experts that its layer holds; in each
layer experts are sorted from most to least important, ties by id.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prunecli.errors import StatisticsError
from prunecli.methods.experts.budget import Layer

STEPS = 1000
"""The released code tries theta = 0.001, 0.002, ..., 1."""

Values = Mapping[str, NDArray[Any]]
"""Layer's name -> `[experts]`, the metric of every original expert."""


def ranked(layer: Layer, values: NDArray[Any]) -> tuple[list[int], NDArray[np.float64]]:
    """The layer's experts from most to least important, and the share phi of each, summing to 1.

    Args:
        layer: the layer.
        values: `[experts]`, the metric of every original expert.

    Raises:
        StatisticsError: no token reaches any expert that the layer holds.
    """
    importance = np.asarray(values, np.float64)[list(layer.experts)]
    total = importance.sum()
    if not np.isfinite(total) or total <= 0:
        raise StatisticsError(
            f"{layer.name}: the statistics route no token to the experts that it holds.",
            "Collect the gates of this checkpoint, with these languages.",
        )
    order = np.lexsort((np.asarray(layer.experts), -importance))
    return [layer.experts[index] for index in order], importance[order] / total


def in_groups(layer: Layer, order: Sequence[int], groups: int) -> list[list[int]]:
    """`order`, all of the layer's experts, parted into its groups: runs of equal length, by their places in it."""
    held = len(layer.experts)
    group_of = {expert: place * groups // held for place, expert in enumerate(layer.experts)}
    parted: list[list[int]] = [[] for _ in range(groups)]
    for expert in order:
        parted[group_of[expert]].append(expert)
    return parted


def threshold(
    layers: Sequence[Layer], values: Values, count: int, minimum: int, groups: int = 1
) -> tuple[dict[str, tuple[int, ...]], float]:
    """Global threshold (eq. 5): sum_k max(minimum, min(n_k | sum_{i <= n_k} phi(e_ki) >= theta)) = count.

    An expert stays while the mass before it is below theta, so the `count` experts with the least mass before
    them stay, after the first `minimum` of each layer. Equal masses go by rank, then by layer: the count is
    exact. Where a router picks groups first, the experts of one rank within their groups stay or go together.

    Args:
        layers: at least one.
        values: the metric.
        count: experts to keep in these layers, a multiple of `groups`.
        minimum: experts to keep in each, too.
        groups: of like size, in each layer.

    Returns:
        Layer's name -> kept ids, ascending; and theta: the least mass before a removed expert, or 1.
    """
    waiting: list[tuple[float, int, int]] = []  # mass before, rank, layer's number
    order: list[list[int]] = []
    kept: list[int] = []
    for number, layer in enumerate(layers):
        experts, shares = ranked(layer, values[layer.name])
        by_rank = [*zip(*in_groups(layer, experts, groups), strict=True)]
        order.append([expert for ranks in by_rank for expert in ranks])
        share_of = dict(zip(experts, shares, strict=True))
        mass = np.cumsum([sum(share_of[expert] for expert in ranks) for ranks in by_rank])
        before = np.concatenate(([0.0], mass[:-1] / mass[-1]))  # exactly 1 before experts of no importance
        kept.append(min(minimum, len(experts)))
        waiting += [(float(before[rank]), rank, number) for rank in range(kept[-1] // groups, len(by_rank))]
    waiting.sort()
    more = (count - sum(kept)) // groups
    for _, _, number in waiting[:more]:
        kept[number] += groups
    theta = waiting[more][0] if more < len(waiting) else 1.0
    return _first(layers, order, kept), theta


def released_threshold(
    layers: Sequence[Layer], values: Values, count: int, minimum: int
) -> tuple[dict[str, tuple[int, ...]], float]:
    """The threshold as the authors' released code counts it, for statistics that they published.

    It differs from eq. 5 in three ways. The first `minimum` experts of a layer stay, and their mass is left out of
    the sum. Of the others those stay up to whom, themselves included, the mass is below theta. And theta is the first
    multiple of 0.001 that keeps at least `count`, which the layers then fill in order, so that the last ones get
    fewer. A layer whose mass lies on its first experts therefore keeps many more than by eq. 5.

    Args:
        layers: at least one.
        values: the metric.
        count: experts to keep in these layers.
        minimum: experts to keep in each.

    Returns:
        Layer's name -> kept ids, ascending; and theta.
    """
    order: list[list[int]] = []
    first: list[int] = []
    masses: list[NDArray[np.float64]] = []  # of an expert and of those before it, the first ones left out
    for layer in layers:
        experts, shares = ranked(layer, values[layer.name])
        order.append(experts)
        first.append(min(minimum, len(experts)))
        masses.append(np.cumsum(shares[first[-1] :]))
    theta, below = 1.0, [len(mass) for mass in masses]
    for step in range(1, STEPS + 1):
        theta = step / STEPS
        below = [int((mass < theta).sum()) for mass in masses]
        if sum(first) + sum(below) >= count:
            break
    kept, left = [], count - sum(first)
    for least, more in zip(first, below, strict=True):
        kept.append(least + min(more, left))
        left -= min(more, left)
    return _first(layers, order, kept), theta


def _first(
    layers: Sequence[Layer], order: Sequence[Sequence[int]], kept: Sequence[int]
) -> dict[str, tuple[int, ...]]:
    return {
        layer.name: tuple(sorted(experts[:n])) for layer, experts, n in zip(layers, order, kept, strict=True)
    }
