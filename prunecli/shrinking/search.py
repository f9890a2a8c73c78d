"""The cheapest mixture of removals that reaches a target: curves of single kinds, then whole mixtures."""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product, zip_longest
from math import inf, prod

import numpy as np
from scipy.interpolate import PchipInterpolator

from prunecli.errors import UsageError
from prunecli.model.axes import Axis
from prunecli.model.checkpoint import Checkpoint
from prunecli.results.rewriting import Tried
from prunecli.shrinking.levers import Lever

Shares = dict[str, float]
"""Kind of units -> fraction of its units that is removed."""
Metrics = Mapping[str, str]
"""Kind of units -> metric that its units are ranked by."""
Size = Callable[[Shares, Metrics], float]
"""From a mixture to its size."""
POINTS = (0.25, 0.5, 1.0)
"""Places of a curve's points, as fractions of the share at which the kind alone reaches the target."""
GRID = 16
"""Shares of a kind that mixtures are made of, at most; all shares of the kind that fills up to the target."""
FIRST = 3
"""Mixtures with the least predicted cost that are tried beside single kinds and even shares."""
EVEN = 64
"""Even shares are multiples of 1 / EVEN."""
NOISE = 0.005
"""Costs that differ by less than this fraction are equal: the text of a trial is small."""
UNLIKE = ("layers", "heads")
"""Kinds of which some axes may lose more than others, or whose units are not of one size."""
AGAIN = 3
"""Times that a mixture is tried with more of the filler if its size turns out to be above the target."""


def sizes_of(checkpoint: Checkpoint, levers: Mapping[str, Lever], *, in_bytes: bool) -> Size:
    """The function from a mixture's shares and metrics to its parameters or bytes.

    Of each tensor the parts of the units that stay are counted: those of layers and heads that a metric takes, of other
    kinds the share.
    """
    index = {name: place for place, name in enumerate(checkpoint.tensors)}
    sizes = np.array([info.nbytes if in_bytes else info.numel for info in checkpoint.tensors.values()])

    def beginning(name: str) -> list[int]:
        return [place for other, place in index.items() if other.startswith(name)] if name else []

    def held(axis: Axis) -> list[tuple[str, tuple[int, ...], list[int]]]:
        """Units of an axis with the places of the tensors that hold them; each layer has tensors of its own."""
        if axis.kind == "layer":
            own = [beginning(f"{axis.members.format(place)}.") for place in range(axis.count)]
            return [(axis.name, (layer,), tensors) for layer, tensors in zip(axis.ids, own, strict=True)]
        carriers = [index[name] for name in axis.carriers if name in index]
        return [(axis.name, axis.ids, carriers + beginning(axis.members.partition("{}")[0]))]

    parts = {name: [part for axis in lever.axes for part in held(axis)] for name, lever in levers.items()}

    @cache
    def left(name: str, share: float, metric: str) -> np.ndarray:
        """The fraction of each tensor that stays if a share of one kind is removed."""
        lever, fractions = levers[name], np.ones(len(sizes))
        kept = lever.select(share, metric).kept if name in UNLIKE else {}
        for axis, ids, tensors in parts[name]:
            stay = len({*ids}.intersection(kept[axis])) / len(ids) if axis in kept else 1 - share
            fractions[tensors] *= stay
        return fractions

    def size(shares: Shares, metrics: Metrics) -> float:
        stay = sizes
        for name, share in shares.items():
            stay = stay * left(name, share, metrics[name])
        return float(stay.sum())

    return size


def curve(points: Mapping[float, float]) -> Callable[[float], float]:
    """The function from a share to a cost, between measured points, of which none undercuts those before it.

    Args:
        points: share -> cost.

    Returns:
        The function; infinite beyond the last point.
    """
    shares = sorted(points)
    values = np.maximum.accumulate([points[share] for share in shares])
    inner = PchipInterpolator(shares, values) if len(shares) > 1 else lambda _: values[0]
    return lambda share: inf if share > shares[-1] else float(inner(share))


@dataclass
class Search:
    """Finds the cheapest mixture of removals that reaches a target.

    Attributes:
        levers: the kinds of units.
        size: size of a mixture of shares with metrics, as far as it is known before it is tried.
        value: size of a tried mixture.
        most: largest size that reaches the target.
        base: cost of the original.
        attempt: tries shares with metrics at a stage; returns None if the time is over.
        tried: everything that was tried, in its order.
    """

    levers: Mapping[str, Lever]
    size: Size
    value: Callable[[Tried], float]
    most: float
    base: float
    attempt: Callable[[Shares, dict[str, str], str], Tried | None]

    def __post_init__(self) -> None:
        """Begin with nothing tried."""
        self.tried: list[Tried] = []
        self._metrics = {name: lever.metrics[0] for name, lever in self.levers.items()}
        self._curves: dict[str, Callable[[float], float]] = {}
        self._grids: dict[str, tuple[float, ...]] = {}
        # The kind with most shares fills up to the target.
        self._filler = max(self.levers, key=lambda name: len(self.levers[name].shares))

    def run(self, trials: int) -> Tried:
        """Measure the curves, then whole mixtures; return the best mixture that reaches the target.

        Args:
            trials: number of mixtures beside the first ones that are tried, neighbours of the best.

        Raises:
            UsageError: the model reaches the target as it is, or no mixture does, or the time was over before one was
                measured.
        """
        if self.size({}, {}) <= self.most:
            raise UsageError("The model reaches the target already.", "Choose a smaller target.")
        if self._filled({name: lever.shares[-1] for name, lever in self.levers.items()}) is None:
            raise UsageError(
                "Not even the smallest mixture reaches the target.",
                "Choose a larger target, or allow more kinds with `only`.",
            )
        self._measure_curves()
        self.size = self._measured_size() if self.tried and self.tried[0].speedup else self.size
        for shares in (*self._predicted(), *self._simple()):
            self._whole(shares)
        for _ in range(trials):
            near = [one for one in self._neighbours() if not self._tried_as(one, "whole")]
            if not near or self._whole(near[0]) is None:
                break
        return self._best()

    def _measure_curves(self) -> None:
        """Measure the cost of a few shares of each kind, up to the share that reaches the target alone.

        The middle of every curve comes first, then the ends: the time may be over before all points are measured.
        """
        points = {}
        for name, lever in self.levers.items():
            reach = self._least(name, {}) or lever.shares[-1]
            points[name] = sorted({_nearest(lever.shares[1:], reach * point) for point in POINTS})
        costs: dict[str, dict[str, float]] = {name: {} for name in points}
        # The first metric of every kind, then the second.
        for metrics in zip_longest(*(lever.metrics for lever in self.levers.values())):
            for (name, shares), metric in zip(points.items(), metrics, strict=True):
                made = metric and self._try({name: shares[len(shares) // 2]}, {name: metric}, "curve")
                if made:
                    costs[name][metric] = _cost(made)
        for name, own in costs.items():
            self._metrics[name] = min(own, key=own.__getitem__, default=self._metrics[name])
        for position in (-1, 0):
            for name, shares in points.items():
                self._try({name: shares[position]}, stage="curve")
        for name, shares in points.items():
            self._curves[name] = curve(measured := self._costs(name, shares))
            grid = [share for share in self.levers[name].shares if share <= max(measured)]
            self._grids[name] = tuple(grid[:: -(-len(grid) // GRID)])

    def _costs(self, name: str, shares: Sequence[float]) -> dict[float, float]:
        """Costs of removing these shares of a kind: share -> cost.

        The costs of shares that were not measured, since the time was over, are guessed: they grow with the square of
        the share. Shares that ruin the model are left out.
        """
        metrics = {name: self._metrics[name]}
        tried = {share: self._tried_as({name: share}, "curve", metrics) for share in shares}
        costs = {share: _cost(one) - self.base for share, one in tried.items() if one is not None}
        if costs:
            known = min(costs, key=lambda share: abs(share - shares[len(shares) // 2]))
            costs = {share: costs.get(share, costs[known] * (share / known) ** 2) for share in shares}
        return {0.0: 0.0} | {share: cost for share, cost in costs.items() if cost < inf}

    def _measured_size(self) -> Size:
        """Time of a mixture relative to the original's: the product of the times with each kind alone."""

        points = {name: {0.0: 1.0} for name in self.levers}
        for one in self.tried:
            if len(one.shares) == 1:
                ((name, share),) = one.shares.items()
                points[name][share] = self.value(one)
        known = {name: [*zip(*sorted(own.items()), strict=True)] for name, own in points.items()}
        times = {name: (shares, np.minimum.accumulate(own)) for name, (shares, own) in known.items()}
        return lambda shares, _metrics: prod(
            float(np.interp(share, *times[name])) for name, share in shares.items()
        )

    def _predicted(self) -> list[Shares]:
        """The mixtures with the least predicted cost; each differs from the others by two steps of some kind."""
        grids = {name: grid for name, grid in self._grids.items() if name != self._filler}
        filled = (self._filled(dict(zip(grids, own, strict=True))) for own in product(*grids.values()))
        found = [one for one in filled if one is not None and self._predict(one) < inf]
        chosen: list[Shares] = []
        # Of those that cost the same, as where a curve is flat, the largest comes first.
        for shares in sorted(found, key=lambda one: (self._predict(one), -self.size(one, self._metrics))):
            if len(chosen) < FIRST and all(
                any(
                    abs(shares.get(name, 0.0) - other.get(name, 0.0)) > 1.5 * self._step(name)
                    for name in self.levers
                )
                for other in chosen
            ):
                chosen.append(shares)
        return chosen

    def _simple(self) -> Iterator[Shares]:
        """Yield the mixture with one share for all kinds, then each kind alone, if these reach the target."""
        for step in range(1, EVEN):
            even = {name: _nearest(lever.shares, step / EVEN) for name, lever in self.levers.items()}
            if self.size(even, self._metrics) <= self.most:
                yield {name: share for name, share in even.items() if share}
                break
        for name in self.levers:
            if (alone := self._least(name, {})) is not None:
                yield {name: alone}

    def _neighbours(self) -> list[Shares]:
        """Mixtures beside the best one: a kind a step up or down, the filler adjusted; the cheapest first."""
        best, found = self._best(), []
        for name in self.levers:
            for sign in (-1, 1) if name != self._filler else ():
                present = best.shares.get(name, 0.0)
                step = sign * self._step(name)
                others = [share for share in self.levers[name].shares if (share - present) * sign > 0]
                if others:
                    found.append(self._filled({**best.shares, name: _nearest(others, present + step)}))
        return sorted(filter(None, found), key=self._predict)

    def _step(self, name: str) -> float:
        grid = self._grids[name]
        return grid[-1] / max(len(grid) - 1, 1)

    def _filled(self, shares: Shares, most: float | None = None) -> Shares | None:
        """The mixture with the least share of the filler that reaches the target. None: there is no such share."""
        least = self._least(self._filler, shares, most)
        made = {**shares, self._filler: least}
        return None if least is None else {name: own for name, own in made.items() if own}

    def _least(self, name: str, shares: Shares, most: float | None = None) -> float | None:
        """The least share of a kind with which a mixture is not larger than `most`, or the target."""
        of_kind = self.levers[name].shares
        place = bisect_left(
            of_kind,
            -(most or self.most),
            key=lambda share: -self.size({**shares, name: share}, self._metrics),
        )
        return of_kind[place] if place < len(of_kind) else None

    def _predict(self, shares: Shares) -> float:
        return sum(self._curves[name](share) for name, share in shares.items())

    def _whole(self, shares: Shares) -> Tried | None:
        """Try a mixture; if its size turns out to be above the target, again with more of the filler."""
        made, most = self._try(shares), self.most
        for _ in range(AGAIN):
            if made is None or (value := self.value(made)) <= self.most:
                break
            most *= self.most / value
            more = self._filled(shares, most)
            made = None if more is None else self._try(more)
        return made

    def _try(
        self, shares: Shares, metrics: dict[str, str] | None = None, stage: str = "whole"
    ) -> Tried | None:
        """Try a mixture once. If the time is over, nothing is tried."""
        metrics = metrics or {name: self._metrics[name] for name in shares}
        made = self._tried_as(shares, stage, metrics) or self.attempt(shares, metrics, stage)
        if made is not None and made not in self.tried:
            self.tried.append(made)
        return made

    def _tried_as(self, shares: Shares, stage: str, metrics: dict[str, str] | None = None) -> Tried | None:
        found = (one for one in self.tried if one.shares == shares and one.stage == stage)
        return next((one for one in found if metrics in (None, one.metrics)), None)

    def _best(self) -> Tried:
        """The cheapest mixture that reaches the target.

        Of those that cost about the same, the one whose next tokens are nearest to the original's, or the simplest.

        Raises:
            UsageError: none reaches the target.
        """
        reach = [one for one in self.tried if one.stage == "whole" and self.value(one) <= self.most]
        if not reach:
            raise UsageError(
                "No mixture that was measured reaches the target.",
                "Choose a larger target, allow more kinds with `only`, or give more `minutes`.",
            )
        least = min(map(_cost, reach))
        equal = [one for one in reach if _cost(one) <= least + NOISE * abs(least)]
        if all(one.quality.divergence is not None for one in equal):
            return min(equal, key=lambda one: one.quality.divergence or 0.0)
        return min(equal, key=lambda one: (len(one.shares), _cost(one)))


def _cost(one: Tried) -> float:
    return inf if one.quality.cost is None else one.quality.cost


def _nearest(shares: Sequence[float], share: float) -> float:
    return min(shares, key=lambda one: abs(one - share))
