"""Expert metrics: how much an expert contributes, from additive sums.

Of gates (2212.09811, 4.1), with n the tokens of a layer, per expert e: top1(e) = top1 / n;
top2(e) = (top1 + top2) / n; mean(e) = gate_sum / n; conf(e) = conf1_sum / top1, 0 where no token ranks e first.

Of gates and outputs, which are collected of language models: sums over the n_e tokens that are routed to e, of its
gate g as applied and the norm ‖f‖ of its output, S(b, a, c) = [1 / n_e if b] sum g^a ‖f‖^c (2606.15716). They are 0 of
an expert that no token is routed to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prunecli.errors import StatisticsError, UsageError
from prunecli.model.axes import Axis
from prunecli.results.gate_sums import GateSums, ratio
from prunecli.results.gates import GateStatistics

Values = NDArray[np.float64]
RANDOM = "random"
"""The baseline that needs no statistics."""
AIMER = "aimer"
"""What weights alone say (`methods.experts.aimer`)."""
WITHOUT_STATISTICS = (AIMER, RANDOM)
DEFAULT_METRIC = "importance"
"""Of translation models, as published."""
DEFAULT_TEXT_METRIC = "reap"
"""Of language models."""


@dataclass(frozen=True)
class Metric:
    """One metric: a function of `GateSums` to `[layers, experts]`, and the sums that it needs."""

    function: Callable[[GateSums], Values]
    needs: frozenset[str]

    def __call__(self, sums: GateSums) -> Values:
        return self.function(sums)


def activity_top1(sums: GateSums) -> Values:
    """top1(e): the share of tokens that rank e first. `[layers, experts]`."""
    return ratio(sums.top1, sums.tokens[:, None])


def activity_top2(sums: GateSums) -> Values:
    """top2(e): the share of tokens that rank e first or second. `[layers, experts]`."""
    return ratio(sums.top1 + sums.top2, sums.tokens[:, None])


def mean_gate(sums: GateSums) -> Values:
    """mean(e): the mean gate of e over all tokens. `[layers, experts]`."""
    return ratio(sums.gate_sum, sums.tokens[:, None])


def confidence(sums: GateSums) -> Values:
    """conf(e): the mean gate of e over the tokens that rank it first, or 0. `[layers, experts]`."""
    return ratio(sums.conf1_sum, sums.top1)


def load_balance(sums: GateSums) -> Values:
    """LB(e) = top1(e) x mean(e). `[layers, experts]`."""
    return activity_top1(sums) * mean_gate(sums)


def importance_vanilla(sums: GateSums) -> Values:
    """imp_vanilla(e) = top1(e) x conf(e) (eq. 3). `[layers, experts]`."""
    return activity_top1(sums) * confidence(sums)


def importance(sums: GateSums) -> Values:
    """imp(e) = top1(e) x exp(conf(e)) (eq. 4). `[layers, experts]`."""
    return np.asarray(activity_top1(sums) * np.exp(confidence(sums)), np.float64)


def reap(sums: GateSums) -> Values:
    """REAP: sum g‖f‖ / n_e (2510.13999, eq. 9). `[layers, experts]`."""
    return ratio(sums.gate_norm_sum, sums.routed)


def expert_activation_norm(sums: GateSums) -> Values:
    """EAN: sum ‖f‖ (2510.13999, eq. 13). `[layers, experts]`."""
    return sums.norm_sum


def weighted_expert_activation_norm(sums: GateSums) -> Values:
    """EAN with gates: sum g‖f‖, S(0, 1, 1). `[layers, experts]`."""
    return sums.gate_norm_sum


def frequency(sums: GateSums) -> Values:
    """n_e, the tokens routed to e, S(0, 0, 0). `[layers, experts]`."""
    return np.asarray(sums.routed, np.float64)


def seer(sums: GateSums) -> Values:
    """SEER: sum g, S(0, 1, 0). `[layers, experts]`."""
    return sums.gate_sum


def mean_activation_norm(sums: GateSums) -> Values:
    """MAN: sum ‖f‖ / n_e, S(1, 0, 1). `[layers, experts]`."""
    return ratio(sums.norm_sum, sums.routed)


def mean_square_activation_norm(sums: GateSums) -> Values:
    """MSAN: sum ‖f‖² / n_e, S(1, 0, 2). `[layers, experts]`."""
    return ratio(sums.norm_sq_sum, sums.routed)


METRICS: Mapping[str, Metric] = {
    "importance": Metric(importance, frozenset({"top1", "conf1_sum"})),
    "importance-vanilla": Metric(importance_vanilla, frozenset({"top1", "conf1_sum"})),
    "top1": Metric(activity_top1, frozenset({"top1"})),
    "top2": Metric(activity_top2, frozenset({"top1", "top2"})),
    "load-balance": Metric(load_balance, frozenset({"top1", "gate_sum"})),
    "reap": Metric(reap, frozenset({"routed", "gate_norm_sum"})),
    "ean": Metric(expert_activation_norm, frozenset({"norm_sum"})),
    "frequency": Metric(frequency, frozenset({"routed"})),
    "seer": Metric(seer, frozenset({"routed", "gate_sum"})),  # gate_sum alone is over all tokens
    "man": Metric(mean_activation_norm, frozenset({"routed", "norm_sum"})),
    "msan": Metric(mean_square_activation_norm, frozenset({"routed", "norm_sq_sum"})),
    "weighted-ean": Metric(weighted_expert_activation_norm, frozenset({"gate_norm_sum"})),
}


def metric_named(name: str) -> Metric:
    """The metric of this name.

    Raises:
        UsageError: there is none.
    """
    if name not in METRICS:
        remedy = f"Choose one of {', '.join((*METRICS, *WITHOUT_STATISTICS))}."
        if name in WITHOUT_STATISTICS:
            raise UsageError(f"The metric {name!r} takes no statistics.", remedy)
        raise UsageError(f"No metric {name!r}.", remedy)
    return METRICS[name]


def default_metric(statistics: GateStatistics) -> str:
    """The metric for statistics of this kind where none is asked for."""
    return DEFAULT_TEXT_METRIC if statistics.mode == "text" else DEFAULT_METRIC


def metric_values(name: str, sums: GateSums, statistics: GateStatistics) -> dict[str, Values]:
    """Name of the axis -> `[experts]`, the metric of every original expert, not yet normalised.

    Args:
        name: one of METRICS.
        sums: what to compute it from, of the layers of `statistics`.
        statistics: gives the names of the axes and which sums they hold.

    Raises:
        UsageError: no such metric.
        StatisticsError: they lack what the metric needs.
    """
    metric = metric_named(name)
    held = frozenset(statistics.names) - statistics.lacks
    missing = sorted(metric.needs - held)
    if missing:
        usable = [other for other, candidate in METRICS.items() if candidate.needs <= held]
        raise StatisticsError(
            f"The statistics lack what the metric {name!r} needs ({', '.join(missing)}).",
            f"Choose --metric {' or '.join(usable)}." if usable else "Collect the gates with prunecli.",
        )
    return {axis.name: values for axis, values in zip(statistics.axes, metric(sums), strict=True)}


def random_values(axes: Sequence[Axis], seed: int) -> dict[str, Values]:
    """Name of each axis -> `[original experts]` uniform in (0, 1], the baseline."""
    generator = np.random.default_rng(seed)
    return {axis.name: 1.0 - generator.random(axis.original) for axis in axes}
