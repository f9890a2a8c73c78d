"""Which experts to keep (2212.09811, 4.3): pure functions from metric values to a selection.

Symbols: phi(e) is an expert's metric, normalised to sum 1 over the experts that its layer holds; in each
layer experts are sorted from most to least important, ties by id.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prunecli.errors import StatisticsError, UsageError
from prunecli.methods.experts.budget import (
    DEFAULT_BALANCE,
    MIN_PER_LAYER,
    STRATEGIES,
    Layer,
    Request,
    Strategy,
    check_feasible,
    keep_count,
    layer_counts,
    parse_balance,
    side_counts,
)

__all__ = [
    "DEFAULT_BALANCE",
    "MIN_PER_LAYER",
    "STRATEGIES",
    "Layer",
    "Request",
    "Selection",
    "Strategy",
    "keep_count",
    "layer_counts",
    "parse_balance",
    "plan",
    "ranked",
    "side_counts",
    "threshold",
]


@dataclass(frozen=True)
class Selection:
    """The decision.

    Attributes:
        kept: layer's name -> original ids that stay, ascending.
        thresholds: theta of eq. 5 under `"model"`, or of each side; empty for per-layer.
    """

    kept: Mapping[str, tuple[int, ...]]
    thresholds: Mapping[str, float] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """Experts kept in the whole model."""
        return sum(map(len, self.kept.values()))


def ranked(layer: Layer, values: NDArray[Any]) -> tuple[list[int], NDArray[np.float64]]:
    """The layer's experts from most to least important, and the share phi of each, summing to 1.

    Args:
        layer: the layer.
        values: `[experts]`, the metric of every original expert.

    Raises:
        StatisticsError: no token reaches any expert that the layer holds.
    """
    held = np.asarray(values, np.float64)[list(layer.experts)]
    total = held.sum()
    if not np.isfinite(total) or total <= 0:
        raise StatisticsError(
            f"{layer.name}: the statistics route no token to the experts that it holds.",
            "Collect the gates of this checkpoint, with these languages.",
        )
    order = np.lexsort((np.asarray(layer.experts), -held))
    return [layer.experts[index] for index in order], held[order] / total


def threshold(
    layers: Sequence[Layer], values: Mapping[str, NDArray[Any]], count: int, minimum: int
) -> tuple[dict[str, tuple[int, ...]], float]:
    """Global threshold (eq. 5): sum_k max(minimum, min(n_k | sum_{i <= n_k} phi(e_ki) >= theta)) = count.

    An expert stays while the mass before it is below theta, so the `count` experts with the least mass before
    them stay, after the first `minimum` of each layer. Equal masses go by rank, then by layer: the count is
    exact.

    Args:
        layers: at least one.
        values: layer's name -> `[experts]`, the metric of every original expert.
        count: experts to keep in these layers.
        minimum: experts to keep in each.

    Returns:
        Layer's name -> kept ids, ascending; and theta: the least mass before a removed expert, or 1.
    """
    waiting: list[tuple[float, int, int]] = []  # mass before, rank, layer's number
    order: list[list[int]] = []
    kept: list[int] = []
    for number, layer in enumerate(layers):
        experts, shares = ranked(layer, values[layer.name])
        mass = np.cumsum(shares)
        before = np.concatenate(([0.0], mass[:-1] / mass[-1]))  # exactly 1 before experts of no importance
        order.append(experts)
        kept.append(min(minimum, len(experts)))
        waiting += [(float(before[rank]), rank, number) for rank in range(kept[-1], len(experts))]
    waiting.sort()
    more = count - sum(kept)
    for _, _, number in waiting[:more]:
        kept[number] += 1
    theta = waiting[more][0] if more < len(waiting) else 1.0
    return {
        layer.name: tuple(sorted(experts[:n])) for layer, experts, n in zip(layers, order, kept, strict=True)
    }, theta


def plan(layers: Sequence[Layer], values: Mapping[str, NDArray[Any]], request: Request) -> Selection:
    """Choose the experts to keep.

    Args:
        layers: the checkpoint's sparse layers.
        values: layer's name -> `[experts]`, the metric of every original expert.
        request: how many, by which algorithm.

    Raises:
        UsageError: the request leaves too few experts, or asks for more than there are.
        StatisticsError: a layer's experts have no tokens.
    """
    if request.strategy == "per-layer":
        counts = _requested_counts(layers, request)
        return Selection(
            {
                layer.name: tuple(sorted(ranked(layer, values[layer.name])[0][: counts[layer.name]]))
                for layer in layers
            }
        )
    if request.strategy == "side-threshold":
        return _side_threshold(layers, values, request)
    if request.keep is None:
        raise UsageError(
            "--strategy global-threshold takes one count for the whole model, not --experts-per-layer.",
            "Give --ratio or --fit, or --strategy side-threshold.",
        )
    lowest = sum(min(request.minimum, len(layer.experts)) for layer in layers)
    check_feasible(request.keep, lowest, sum(len(x.experts) for x in layers), len(layers), request.minimum)
    kept, theta = threshold(layers, values, request.keep, request.minimum)
    return Selection(kept, {"model": theta})


def _side_threshold(
    layers: Sequence[Layer], values: Mapping[str, NDArray[Any]], request: Request
) -> Selection:
    if request.per_layer is None:
        counts = side_counts(layers, request.keep or 0, request.balance, request.minimum)
    else:
        fixed = _requested_counts(layers, request)
        counts = {}
        for layer in layers:
            counts[layer.side] = counts.get(layer.side, 0) + fixed[layer.name]
    kept: dict[str, tuple[int, ...]] = {}
    thetas: dict[str, float] = {}
    for side, count in counts.items():
        own = [layer for layer in layers if layer.side == side]
        chosen, thetas[side] = threshold(own, values, count, request.minimum)
        kept.update(chosen)
    return Selection({layer.name: kept[layer.name] for layer in layers}, thetas)


def _requested_counts(layers: Sequence[Layer], request: Request) -> dict[str, int]:
    if request.per_layer is None:
        return layer_counts(layers, request.keep or 0, request.balance, request.minimum)
    for side, count in request.per_layer.items():
        widths = [len(layer.experts) for layer in layers if layer.side == side]
        if widths and not request.minimum <= count <= max(widths):
            raise UsageError(
                f"--experts-per-layer asks for {count} in each {side} layer: it must be "
                f"{request.minimum} to {max(widths)}.",
                "Fewer than the router picks cannot run; more than the layer holds do not exist.",
            )
    return {layer.name: min(request.per_layer[layer.side], len(layer.experts)) for layer in layers}
