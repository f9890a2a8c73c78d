"""How many experts each layer or side keeps, and which (2212.09811, 4.3): pure functions from metric values to ids.

At most as many as requested are kept, at least a layer's minimum, and at most as many as the layer holds.

Symbols: phi(e) is an expert's metric, normalised to sum 1 over the experts that its layer holds; in each
layer experts are sorted from most to least important, ties by id.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil, floor, lcm
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from prunecli.errors import StatisticsError, UsageError
from prunecli.methods.experts.names import Strategy
from prunecli.methods.experts.options import ExpertOptions, of_language_model
from prunecli.model.axes import Axis
from prunecli.model.mixtures import predicting_tensors
from prunecli.model.sparse_layer import Groups, SparseLayer
from prunecli.selection.select import Budget, Kept, Values, allotted, select
from prunecli.tensors.quantities import exact_share

if TYPE_CHECKING:
    from prunecli.model.checkpoint import Checkpoint

STEPS = 1000
"""The released code tries theta = 0.001, 0.002, ..., 1."""
UNBALANCED = Fraction(3)
UNBALANCED_FROM = 128
"""Experts per layer from which the paper's 3:1 is the default: as many as the only model that it was found best for.
With 32 and 64 a layer, 1:1 is as good or better at every ratio (docs/performance.md)."""
MIN_PER_LAYER = 4
"""Experts that the paper keeps at least in each layer under a threshold."""


@dataclass(frozen=True)
class Request:
    """How many experts to keep, and by which algorithm.

    Attributes:
        keep: at most this many in the whole model; None if `per_layer` is given.
        per_layer: side -> experts to keep in each of its layers, instead of `keep`.
        strategy: the algorithm of 4.3.
        balance: encoder experts per decoder expert, layer by layer (3 is the paper's 3:1); `default_balance`.
        minimum: at least this many in each layer.
        released: thresholds as the authors' released code counts them, instead of eq. 5.
        step: per-layer counts are multiples of this.
        groups: of equal size that a router picks from; the same number stays in each (`least_experts`). A divisor of
            `step`.
    """

    keep: int | None = None
    per_layer: Mapping[str, int] | None = None
    strategy: Strategy = "per-layer"
    balance: Fraction = Fraction(1)
    minimum: int = 2
    released: bool = False
    step: int = 1
    groups: int = 1


def layers_of(checkpoint: Checkpoint, options: ExpertOptions) -> tuple[SparseLayer, ...]:
    """The layers that experts are chosen in, with the experts per token of the result.

    Raises:
        UsageError: the model has no layers that `--mtp drop` removes, or `--active` is more than now.
    """
    layers = checkpoint.require_mixtures()
    if options.mtp == "drop":
        layers = tuple(layer for layer in layers if not layer.is_predicting)
        if not predicting_tensors(checkpoint, checkpoint.resolved.sizes):
            raise UsageError(
                f"{checkpoint.path} has no layers that predict further tokens.", "Leave --mtp drop out."
            )
    if options.active is None:
        return layers
    mixture, top_k = checkpoint.resolved.family.mixture, layers[0].top_k
    if mixture is None or isinstance(mixture.top_k, int):
        raise UsageError(
            f"--active {options.active}: a router of type {checkpoint.model_type} always picks {top_k}.",
            "Leave --active out.",
        )
    if not 1 <= options.active <= top_k:
        raise UsageError(
            f"--active {options.active}: the router picks {top_k} experts for each token.",
            f"Give a number from 1 to {top_k}.",
        )
    return tuple(replace(layer, top_k=options.active) for layer in layers)


def request_of(checkpoint: Checkpoint, options: ExpertOptions, layers: Sequence[SparseLayer]) -> Request:
    """The request that the options make, without the number of experts to keep.

    Args:
        layers: see `layers_of`.

    Raises:
        UsageError: a minimum that leaves the router too few.
    """
    least = max(least_experts(layer.top_k, layer.groups) for layer in layers)
    minimum = options.least
    if minimum is None:
        minimum = least if options.strategy == "per-layer" else max(least, MIN_PER_LAYER)
    if minimum < least:
        raise UsageError(f"--min {minimum}: the router picks {least} experts for each token.")
    balance = options.balance or (
        Fraction(1)
        if of_language_model(checkpoint)
        else default_balance(layer.original_experts for layer in layers)
    )
    groups = layers[0].groups.count
    step = lcm(groups, options.multiple_of)
    return Request(None, None, options.strategy, balance, minimum, step=step, groups=groups)


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
    """Encoder experts per decoder expert for layers that had these numbers of experts originally."""
    return UNBALANCED if max(originals, default=0) >= UNBALANCED_FROM else Fraction(1)


def starved(axes: Sequence[Axis], kept: Kept) -> str | None:
    """The warning if decoder layers lose a larger part of their experts than encoder layers, which costs quality.

    If the layers lose alike, are of one side, or have as many experts as the paper's model, there is none.
    """
    sides = [axes_in(side, axes) for side in ("encoder", "decoder")]
    if not all(sides) or default_balance(axis.original for axis in axes) == UNBALANCED:
        return None
    held = [sum(len(axis.ids) for axis in own) for own in sides]
    left = [sum(len(kept[axis.name]) for axis in own) for own in sides]
    if left[1] * held[0] >= left[0] * held[1]:
        return None
    encoder, decoder = (
        f"{left[n] / len(own):.3g} of {held[n] / len(own):.3g}" for n, own in enumerate(sides)
    )
    return (
        f"Decoder layers keep {decoder} experts, encoder layers {encoder}: with fewer than {UNBALANCED_FROM} a "
        "layer this costs quality. --balance 1:1 is safer."
    )


def least_experts(top_k: int, groups: Groups) -> int:
    """Experts that a layer needs so that its router can still pick `top_k` for each token, and as many in each group.

    A router with groups picks the best `chosen` of them first, then experts of those alone: chosen x (experts of a
    group) must not be less than `top_k`.
    """
    return groups.count * max(groups.least, ceil(top_k / groups.chosen))


def axes_in(part: str, axes: Sequence[Axis]) -> list[Axis]:
    """The axes of a side, or of `"model"` all."""
    return [axis for axis in axes if part in ("model", axis.side)]


def counts_by_part(axes: Sequence[Axis], request: Request) -> dict[str, int]:
    """Number of experts that stay in each part of the model: each axis (per-layer), each side, or `"model"`.

    With a balance, the number d of decoder experts is the largest that fits. Encoder layers keep floor(balance x d);
    an encoder's whole side floor(balance x L_enc / L_dec x d), L counting layers. A part that would exceed its layers,
    or fall below the minimum, stops there and the other side gets the rest. A model with one side has no balance to
    keep. Numbers of single layers are multiples of `Request.step`.

    Raises:
        UsageError: the request leaves too few experts, or asks for more than there are; or a layer holds too few for
            `Request.step`.
    """
    if request.per_layer is not None:
        return _stated(axes, request, request.per_layer)
    keep, step = request.keep or 0, request.step
    _check_feasible(axes, request, keep)
    if request.strategy == "global-threshold":
        return {"model": keep}
    if request.strategy == "per-layer":
        parts = {axis.name: [axis] for axis in axes}
    else:
        parts = {axis.side: axes_in(axis.side, axes) for axis in axes}
    layers = {own[0].side: len(own) for own in parts.values()}
    scale = {  # experts of the part for each expert of a decoder's part
        name: Fraction(len(own), layers.get("decoder", len(own)))
        * (request.balance if own[0].side == "encoder" and len(layers) == 2 else 1)
        for name, own in parts.items()
    }
    bounds = {
        name: (fewest(own, request), sum(len(axis.ids) // step * step for axis in own))
        for name, own in parts.items()
    }

    def counts(decoder: int) -> dict[str, int]:
        return {
            name: min(most, max(least, floor(scale[name] * decoder) // step * step))
            for name, (least, most) in bounds.items()
        }

    full = floor(max(most for _, most in bounds.values()) / min(*scale.values(), Fraction(1))) + 1
    fitting = bisect_right(range(full + 1), keep, key=lambda decoder: sum(counts(decoder).values()))
    return counts(fitting - 1)


def _check_feasible(axes: Sequence[Axis], request: Request, keep: int) -> None:
    """Refuse to keep only `keep` experts if the layers need more, with the arithmetic."""
    step, held, lowest = request.step, sum(len(axis.ids) for axis in axes), fewest(axes, request)
    minimum = ceil(request.minimum / step) * step
    for axis in axes if request.strategy == "per-layer" and step > 1 else ():
        if len(axis.ids) < minimum:
            raise UsageError(
                f"{axis.module} holds {len(axis.ids)} experts: no multiple of {step} lies between the "
                f"{minimum - step + 1} or more that are needed and those.",
                "Give a smaller --multiple-of, or none.",
            )
    if keep < lowest:
        raise UsageError(
            f"{keep} of {held} experts would stay: fewer than {minimum} in each of {len(axes)} sparse layers "
            f"({lowest} in all).",
            f"Remove at most {floor((1 - Fraction(lowest, held)) * 1000) / 10:g}% (--ratio)"
            + (", or lower --min." if minimum > 2 else "; the router picks that many for each token."),
        )


def _stated(axes: Sequence[Axis], request: Request, per_layer: Mapping[str, int]) -> dict[str, int]:
    """The numbers of `--experts-per-layer`, of each axis or added up by side."""
    if request.strategy == "global-threshold":
        raise UsageError(
            "--strategy global-threshold takes one count for the whole model, not --experts-per-layer.",
            "Give --ratio or --fit, or --strategy side-threshold.",
        )
    for side, count in per_layer.items():
        if count % request.step:
            raise UsageError(
                f"--experts-per-layer asks for {count}: it must be a multiple of {request.step}.",
                "The groups of the router and --multiple-of ask for that.",
            )
        widths = [len(axis.ids) for axis in axes if axis.side == side]
        if widths and not request.minimum <= count <= max(widths):
            raise UsageError(
                f"--experts-per-layer asks for {count} in each {side} layer: it must be "
                f"{request.minimum} to {max(widths)}.",
                "Fewer than the router picks cannot run; more than the layer holds do not exist.",
            )
    counts: dict[str, int] = {}
    for axis in axes:
        part = axis.name if request.strategy == "per-layer" else axis.side
        counts[part] = counts.get(part, 0) + min(per_layer[axis.side], len(axis.ids))
    return counts


def fewest(axes: Sequence[Axis], request: Request) -> int:
    """The fewest experts that may stay in these layers: the minimum of each, or all, in multiples of the step."""
    least, step = ceil(request.minimum / request.step), request.step
    return sum(min(least, len(axis.ids) // step) * step for axis in axes)


def kept_counts(axes: Sequence[Axis], request: Request, keep: int) -> dict[str, int]:
    """Experts per axis if at most `keep` stay in all; under a threshold, spread evenly over the layers.

    Raises:
        UsageError: `keep` leaves less than the minimum per layer.
    """
    parts = counts_by_part(axes, replace(request, keep=keep))
    if request.strategy == "per-layer":
        return parts
    counts: dict[str, int] = {}
    for part, left in parts.items():
        own = sorted(axes_in(part, axes), key=lambda axis: len(axis.ids))
        for place, axis in enumerate(own):
            counts[axis.name] = min(len(axis.ids), left // (len(own) - place))
            left -= counts[axis.name]
    return counts


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
