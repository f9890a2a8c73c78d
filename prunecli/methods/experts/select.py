"""Which experts to keep (2212.09811, 4.3): pure functions from metric values to a selection."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any, NamedTuple

from numpy.typing import NDArray

from prunecli.architectures.records import Side
from prunecli.errors import UsageError
from prunecli.methods.experts.budget import (
    Layer,
    Request,
    check_feasible,
    layer_counts,
    side_counts,
)
from prunecli.methods.experts.thresholds import in_groups, ranked, released_threshold, threshold


class StatedLayer(NamedTuple):
    """A sparse layer, as far as statistics tell of it."""

    name: str
    side: Side
    experts: tuple[int, ...]


@dataclass(frozen=True)
class KeptExperts:
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


def select_experts(
    layers: Sequence[Layer], values: Mapping[str, NDArray[Any]], request: Request
) -> KeptExperts:
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
        return KeptExperts(
            {
                layer.name: first_of_groups(
                    layer, ranked(layer, values[layer.name])[0], counts[layer.name], request.groups
                )
                for layer in layers
            }
        )
    by_threshold = released_threshold if request.released else threshold
    if request.strategy == "side-threshold":
        if request.per_layer is None:
            budgets = side_counts(layers, request.keep or 0, request.balance, request.minimum)
        else:
            budgets = {}
            counts = _requested_counts(layers, request)
            for layer in layers:
                budgets[layer.side] = budgets.get(layer.side, 0) + counts[layer.name]
        kept: dict[str, tuple[int, ...]] = {}
        thetas: dict[str, float] = {}
        for side, count in budgets.items():
            own = [layer for layer in layers if layer.side == side]
            chosen, thetas[side] = by_threshold(own, values, count, request.minimum)
            kept |= chosen
        return KeptExperts({layer.name: kept[layer.name] for layer in layers}, thetas)
    if request.keep is None:
        raise UsageError(
            "--strategy global-threshold takes one count for the whole model, not --experts-per-layer.",
            "Give --ratio or --fit, or --strategy side-threshold.",
        )
    groups, minimum = request.groups, ceil(request.minimum / request.groups) * request.groups
    lowest = sum(min(minimum, len(layer.experts)) for layer in layers)
    check_feasible(request.keep, lowest, sum(len(x.experts) for x in layers), len(layers), minimum)
    if groups > 1:
        keep = request.keep // groups * groups
        kept, theta = threshold(layers, values, keep, minimum, groups)
    else:
        kept, theta = by_threshold(layers, values, request.keep, minimum)
    return KeptExperts(kept, {"model": theta})


def first_of_groups(layer: Layer, order: Sequence[int], count: int, groups: int = 1) -> tuple[int, ...]:
    """The `count` experts that come first in `order`, as many of each group, ascending.

    Args:
        layer: its experts lie in `groups` runs of equal length, by their places in it.
        order: all of its experts.
        count: a multiple of `groups`.

    Raises:
        UsageError: the groups do not divide its experts, or the count.
    """
    held = len(layer.experts)
    if held % groups or count % groups:
        raise UsageError(
            f"{layer.name}: {groups} groups divide not both the {held} experts that it holds and the {count} to keep.",
            f"Keep a multiple of {groups} in each layer.",
        )
    chosen = (own[: count // groups] for own in in_groups(layer, order, groups))
    return tuple(sorted(expert for own in chosen for expert in own))


def _requested_counts(layers: Sequence[Layer], request: Request) -> dict[str, int]:
    if request.per_layer is None:
        return layer_counts(layers, request.keep or 0, request.balance, request.minimum, request.step)
    for side, count in request.per_layer.items():
        if count % request.step:
            raise UsageError(
                f"--experts-per-layer asks for {count}: it must be a multiple of {request.step}.",
                "The groups of the router and --multiple-of ask for that.",
            )
        widths = [len(layer.experts) for layer in layers if layer.side == side]
        if widths and not request.minimum <= count <= max(widths):
            raise UsageError(
                f"--experts-per-layer asks for {count} in each {side} layer: it must be "
                f"{request.minimum} to {max(widths)}.",
                "Fewer than the router picks cannot run; more than the layer holds do not exist.",
            )
    return {layer.name: min(request.per_layer[layer.side], len(layer.experts)) for layer in layers}
