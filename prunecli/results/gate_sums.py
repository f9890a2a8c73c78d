"""The sums that gate statistics are made of (2212.09811, 4.1-4.2; 2510.13999, eq. 9), and how several become one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Mode = Literal["forced", "beam", "published", "text"]
SUMS = ("tokens", "top1", "top2", "gate_sum", "conf1_sum", "conf2_sum")
ROUTED_SUMS = (
    "routed",
    "gate_sq_sum",
    "norm_sum",
    "norm_sq_sum",
    "gate_norm_sum",
    "gate_norm_sq_sum",
    "norm_max",
)
"""Over the tokens that are routed to an expert; what is collected of language models beside SUMS."""
TEXT_SUMS = (*SUMS, *ROUTED_SUMS)
COUNTS = ("tokens", "top1", "top2", "routed")
MAXIMA = ("norm_max",)
"""Those of ROUTED_SUMS that are no sums: the larger of two stands for both."""


def _absent() -> Array:
    return np.zeros((0, 0))


@dataclass(frozen=True)
class GateSums:
    """Sums over the real tokens of one entry: no padding, no finished beams.

    The gate g is the softmax over all experts, before the renormalisation over the chosen ones; of language models
    it is the weight by which the router multiplies an expert's output, 0 for a token that is not routed to it, and
    ranks go by it. f is an expert's output before that.

    Attributes:
        tokens: `[layers]`, tokens routed.
        top1: `[layers, experts]`, tokens that rank the expert first.
        top2: `[layers, experts]`, tokens that rank it second.
        gate_sum: `[layers, experts]`, sum of g over all tokens.
        conf1_sum: `[layers, experts]`, sum of g over the tokens that rank it first.
        conf2_sum: `[layers, experts]`, the same over the tokens that rank it second.
        routed: `[layers, experts]`, tokens routed to the expert. This and all that follow are `[0, 0]` where they
            are not collected.
        gate_sq_sum: `[layers, experts]`, sum of g² over those.
        norm_sum, norm_sq_sum: `[layers, experts]`, sums of ‖f‖ and of ‖f‖² over those.
        gate_norm_sum, gate_norm_sq_sum: `[layers, experts]`, sums of g‖f‖ and of g²‖f‖² over those.
        norm_max: `[layers, experts]`, the largest ‖f‖ among those, 0 without any.
    """

    tokens: Array
    top1: Array
    top2: Array
    gate_sum: Array
    conf1_sum: Array
    conf2_sum: Array
    routed: Array = field(default_factory=_absent)
    gate_sq_sum: Array = field(default_factory=_absent)
    norm_sum: Array = field(default_factory=_absent)
    norm_sq_sum: Array = field(default_factory=_absent)
    gate_norm_sum: Array = field(default_factory=_absent)
    gate_norm_sq_sum: Array = field(default_factory=_absent)
    norm_max: Array = field(default_factory=_absent)

    @property
    def names(self) -> tuple[str, ...]:
        """Those that are collected: SUMS or TEXT_SUMS."""
        return SUMS if self.routed.shape != self.top1.shape else TEXT_SUMS

    def __add__(self, other: GateSums) -> GateSums:
        """What both hold, together."""
        names = self.names if len(self.names) <= len(other.names) else other.names
        return GateSums(**{name: _joined(name)(getattr(self, name), getattr(other, name)) for name in names})

    def plus(self, layers: Mapping[int, GateSums]) -> GateSums:
        """With sums of some layers, `[1]` and `[1, experts]` of each, added under the layer's number."""
        sums = GateSums(**{name: getattr(self, name).copy() for name in self.names})
        for index, row in layers.items():
            for name in self.names:
                array = getattr(sums, name)
                array[index] = _joined(name)(array[index], getattr(row, name)[0])
        return sums

    def of_layers(self, rows: Sequence[int]) -> GateSums:
        """Those of some layers, in this order."""
        return GateSums(**{name: getattr(self, name)[list(rows)] for name in self.names})

    @classmethod
    def zeros(cls, layers: int, experts: int, names: Sequence[str] = SUMS) -> GateSums:
        """No tokens yet: integer counts, float64 sums."""
        return cls(
            **{
                name: np.zeros(shape_of(name, layers, experts), np.int64 if name in COUNTS else np.float64)
                for name in names
            }
        )


def _joined(name: str) -> Callable[[Array, Array], Array]:
    return np.maximum if name in MAXIMA else np.add


def shape_of(name: str, layers: int, experts: int) -> tuple[int, ...]:
    return (layers,) if name == "tokens" else (layers, experts)


def combine(parts: Sequence[GateSums], mode: Mode) -> GateSums:
    """At least one in one; the order is the caller's, so that equal inputs give equal bits.

    Sums are added, of maxima the largest stays. Published ratios are averaged, each of them alone and every entry
    weighing alike, as the authors' code does: the mean of conf, not conf over all tokens.
    """
    if mode != "published" or len(parts) == 1:
        return reduce(GateSums.__add__, parts)
    top1, top2, gate_sum = (
        np.mean([getattr(part, name) for part in parts], axis=0) for name in ("top1", "top2", "gate_sum")
    )
    conf1, conf2 = (
        np.mean([ratio(getattr(part, f"conf{n}_sum"), getattr(part, f"top{n}")) for part in parts], axis=0)
        for n in (1, 2)
    )
    return GateSums(np.ones(len(top1)), top1, top2, gate_sum, conf1 * top1, conf2 * top2)


def ratio(numerator: Array, denominator: Array) -> NDArray[np.float64]:
    """numerator / denominator, 0 where the denominator is 0."""
    bottom = np.broadcast_to(np.asarray(denominator, np.float64), np.shape(numerator))
    result = np.zeros(np.shape(numerator), np.float64)
    np.divide(numerator, bottom, out=result, where=bottom != 0)
    return result
