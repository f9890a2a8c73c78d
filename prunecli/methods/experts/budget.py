"""How many experts each layer or side keeps (2212.09811, 4.3): whole numbers, nothing of their values.

Never more stay than asked for, never fewer than a layer's minimum, never more than a layer holds.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor
from typing import Protocol, TypeVar, get_args

from prunecli.architectures.records import Side
from prunecli.errors import UsageError
from prunecli.methods.experts.names import Strategy
from prunecli.tensors.quantities import exact_share

K = TypeVar("K")
STRATEGIES: tuple[str, ...] = get_args(Strategy)
UNBALANCED = Fraction(3)
UNBALANCED_FROM = 128
"""The paper's 3:1 is the default from so many experts a layer on: those of the only model that it was found best for.
With 32 and 64 a layer, 1:1 is as good or better at every ratio (docs/performance.md)."""
MIN_PER_LAYER = 4
"""What the paper keeps at least in each layer under a threshold."""


class Layer(Protocol):
    """What experts are chosen from: a `SparseLayer`, or what statistics alone say of one."""

    @property
    def name(self) -> str:
        """Of its FFN."""

    @property
    def side(self) -> Side:
        """Of which stack."""

    @property
    def experts(self) -> tuple[int, ...]:
        """Original ids of the experts that it holds."""


@dataclass(frozen=True)
class Request:
    """How many experts to keep, and by which algorithm.

    Attributes:
        keep: at most this many in the whole model; None where `per_layer` says it.
        per_layer: experts per layer of each side, instead of `keep`.
        strategy: the algorithm of 4.3.
        balance: encoder experts per decoder expert, layer by layer (3 is the paper's 3:1); `default_balance`.
        minimum: at least this many in each layer.
        released: thresholds as the authors' released code counts them, instead of eq. 5.
        step: per-layer counts are multiples of this.
        groups: of equal size that a router picks from; the same number stays in each (`least_experts`). A divisor of
            `step`.
    """

    keep: int | None = None
    per_layer: Mapping[Side, int] | None = None
    strategy: Strategy = "per-layer"
    balance: Fraction = Fraction(1)
    minimum: int = 2
    released: bool = False
    step: int = 1
    groups: int = 1


def keep_count(ratio: float, held: int) -> int:
    """Experts to keep at most, floor((1 - ratio) x held), so that never less is removed than asked.

    Raises:
        UsageError: the ratio is outside [0, 1).
    """
    return floor((1 - exact_share(ratio, "experts", 0.8)) * held)


def parse_balance(text: str) -> Fraction:
    """`3:1` -> 3: encoder experts per decoder expert.

    Raises:
        UsageError: not two positive numbers.
    """
    encoder, _, decoder = text.partition(":")
    try:
        parts = Fraction(encoder.strip()), Fraction(decoder.strip() or "1")
        if min(parts) <= 0:
            raise ValueError(text)
    except (ValueError, ZeroDivisionError) as error:
        raise UsageError(
            f"--balance {text!r} is not ENCODER:DECODER.",
            "Give two positive numbers: 3:1 keeps three times as many.",
        ) from error
    return parts[0] / parts[1]


def balance_text(balance: Fraction) -> str:
    """3 -> `3:1`."""
    return f"{balance.numerator}:{balance.denominator}"


def default_balance(originals: Iterable[int]) -> Fraction:
    """Encoder experts per decoder expert for layers that had so many experts originally."""
    return UNBALANCED if max(originals, default=0) >= UNBALANCED_FROM else Fraction(1)


def starved(layers: Sequence[Layer], originals: Sequence[int], kept: Mapping[str, int]) -> str | None:
    """What to say before the decoder's layers lose more of their experts than the encoder's, where that costs quality.

    Args:
        layers: the checkpoint's sparse layers.
        originals: how many experts each of them had originally.
        kept: layer's name -> experts that stay.

    Returns:
        None for layers that lose alike, of one side, or with as many experts as the paper's model.
    """
    held: dict[Side, int] = {}
    left: dict[Side, int] = {}
    count: dict[Side, int] = {}
    for layer in layers:
        held[layer.side] = held.get(layer.side, 0) + len(layer.experts)
        left[layer.side] = left.get(layer.side, 0) + kept[layer.name]
        count[layer.side] = count.get(layer.side, 0) + 1
    if len(held) < 2 or default_balance(originals) == UNBALANCED:
        return None
    if left["decoder"] * held["encoder"] >= left["encoder"] * held["decoder"]:
        return None
    encoder, decoder = (
        f"{left[side] / count[side]:.3g} of {held[side] / count[side]:.3g}" for side in ("encoder", "decoder")
    )
    return (
        f"Decoder layers keep {decoder} experts, encoder layers {encoder}: with fewer than {UNBALANCED_FROM} a "
        "layer this costs quality. --balance 1:1 is safer."
    )


def least_experts(top_k: int, groups: int = 1, picked: int = 1, at_least: int = 1) -> int:
    """Experts that a layer needs so that its router can still pick `top_k` for each token, and as many in each group.

    A router with groups picks the best `picked` of them first, then experts of those alone: picked x (experts of a
    group) must not be less than `top_k`.

    Args:
        top_k: experts that it picks for each token.
        groups: of equal size that the layer's experts are in (DeepSeek's `n_group`).
        picked: groups that it picks for each token (`topk_group`).
        at_least: experts of a group that its score is made of (2 in DeepSeek-V3, 1 in V2).
    """
    return groups * max(at_least, ceil(top_k / picked))


def layer_counts(
    layers: Sequence[Layer], keep: int, balance: Fraction, minimum: int, step: int = 1
) -> dict[str, int]:
    """Experts per layer under fixed per layer: layer's name -> count, at most `keep` in all, multiples of `step`.

    The decoder count d is the largest whole number that fits, the encoder keeps floor(balance x d). A side
    that would exceed its layers, or fall below `minimum`, stops there and the other side gets the rest. A
    model with one side has no balance to keep.

    Raises:
        UsageError: `keep` leaves less than `minimum` per layer, or a layer holds too few for `step`.
    """
    widths = {layer.name: len(layer.experts) // step * step for layer in layers}
    minimum = ceil(minimum / step) * step
    for layer in layers if step > 1 else ():
        if widths[layer.name] < minimum:
            raise UsageError(
                f"{layer.name} holds {len(layer.experts)} experts: no multiple of {step} lies between the "
                f"{minimum - step + 1} or more that are needed and those.",
                "Give a smaller --multiple-of, or none.",
            )
    lowest = {name: min(minimum, width) for name, width in widths.items()}
    held = sum(len(layer.experts) for layer in layers)
    check_feasible(keep, sum(lowest.values()), held, len(layers), minimum)
    scales = _scales(layers, balance)
    return _filled(keep, widths, lowest, {layer.name: scales[layer.side] for layer in layers}, step)


def side_counts(layers: Sequence[Layer], keep: int, balance: Fraction, minimum: int) -> dict[Side, int]:
    """Experts per side under enc/dec threshold, by the same rule as `layer_counts` for whole sides.

    For d decoder experts it keeps floor(balance x L_enc / L_dec x d) encoder experts, L counting layers.

    Raises:
        UsageError: `keep` leaves less than `minimum` per layer.
    """
    sides = list(dict.fromkeys(layer.side for layer in layers))
    own = {side: [layer for layer in layers if layer.side == side] for side in sides}
    widths = {side: sum(len(layer.experts) for layer in own[side]) for side in sides}
    lowest = {side: sum(min(minimum, len(layer.experts)) for layer in own[side]) for side in sides}
    check_feasible(keep, sum(lowest.values()), sum(widths.values()), len(layers), minimum)
    scale = _scales(layers, balance)
    if len(sides) == 2:
        scale["encoder"] *= Fraction(len(own["encoder"]), len(own["decoder"]))
    return _filled(keep, widths, lowest, scale)


def _scales(layers: Sequence[Layer], balance: Fraction) -> dict[Side, Fraction]:
    sides = {layer.side for layer in layers}
    return {side: balance if side == "encoder" and len(sides) == 2 else Fraction(1) for side in sides}


def _filled(
    keep: int, widths: Mapping[K, int], lowest: Mapping[K, int], scale: Mapping[K, Fraction], step: int = 1
) -> dict[K, int]:
    """Experts of layers or sides for the most decoder experts with which at most `keep` stay in all.

    Args:
        widths, lowest: of each, at most and at least; `keep` is no less than the sum of `lowest`.
        scale: of each, experts per decoder expert.
        step: counts are multiples of this, where `lowest` and `widths` are.
    """

    def counts(decoder: int) -> dict[K, int]:
        return {
            key: min(width, max(lowest[key], floor(scale[key] * decoder) // step * step))
            for key, width in widths.items()
        }

    full = floor(max(widths.values()) / min(*scale.values(), Fraction(1))) + 1
    fitting = bisect_right(range(full + 1), keep, key=lambda decoder: sum(counts(decoder).values()))
    return counts(fitting - 1)


def check_feasible(keep: int, lowest: int, held: int, layers: int, minimum: int) -> None:
    """Refuse to keep `keep` of `held` experts where `layers` layers need `minimum` each, `lowest` in all.

    Raises:
        UsageError: with the arithmetic.
    """
    if keep < lowest:
        raise UsageError(
            f"{keep} of {held} experts would stay: fewer than {minimum} in each of {layers} sparse layers "
            f"({lowest} in all).",
            f"Remove at most {floor((1 - Fraction(lowest, held)) * 1000) / 10:g}% (--ratio)"
            + (", or lower --min." if minimum > 2 else "; the router picks that many for each token."),
        )


def kept_counts(layers: Sequence[Layer], request: Request, keep: int) -> dict[str, int]:
    """Experts per layer when at most `keep` stay in all; under a threshold, spread evenly over the layers.

    Raises:
        UsageError: `keep` leaves less than the minimum per layer.
    """
    if request.strategy == "per-layer":
        return layer_counts(layers, keep, request.balance, request.minimum, request.step)
    groups: list[tuple[list[Layer], int]] = [(list(layers), keep)]
    if request.strategy == "side-threshold":
        counts = side_counts(layers, keep, request.balance, request.minimum)
        groups = [([x for x in layers if x.side == side], count) for side, count in counts.items()]
    found: dict[str, int] = {}
    for members, count in groups:
        left = count
        for place, layer in enumerate(sorted(members, key=lambda x: len(x.experts))):
            found[layer.name] = min(len(layer.experts), left // (len(members) - place))
            left -= found[layer.name]
    return {layer.name: found[layer.name] for layer in layers}
