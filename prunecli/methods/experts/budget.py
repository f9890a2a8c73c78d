"""How many experts each layer or side keeps, and which (2212.09811, 4.3): functions from metric values to ids.

At most as many as requested are kept, at least a layer's minimum, and at most as many as the layer holds.

Symbols: phi(e) is an expert's metric, normalised to sum 1 over the experts that its layer holds; in each
layer experts are sorted from most to least important, ties by id.

`smallest_ratio` finds the number of experts that fits in a memory. The memory holds the weights in the target type,
what decoding needs at a given batch, beam and length (both by the formulas of `model.cost`), and a margin of 10 %
for the own context of the device and for fragmentation.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil, floor
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from prunecli.errors import StatisticsError, UsageError
from prunecli.methods.options import Strategy
from prunecli.model.axes import Axis
from prunecli.model.cost import Load, decoding_bytes, expert_bytes, tensor_bytes
from prunecli.model.find_axes import axes_of
from prunecli.model.sparse_layer import Groups
from prunecli.selection.select import Budget, Kept, Values, allotted, select
from prunecli.tensors.dtypes import parse_dtype
from prunecli.tensors.quantities import bytes_text, exact_share

if TYPE_CHECKING:
    from prunecli.model.checkpoint import Checkpoint

MARGIN = Fraction(1, 10)
"""Part of the memory that is left free."""
ENOUGH = 1 << 40
"""Number d of `counts_by_part` for which every part is full, whatever the balance."""
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
            "not ENCODER:DECODER",
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
    sides = [[axis for axis in axes if axis.side == side] for side in ("encoder", "decoder")]
    if not all(sides) or default_balance(axis.original for axis in axes) == UNBALANCED:
        return None
    (left, held), (left_decoder, held_decoder) = (
        (sum(len(kept[axis.name]) for axis in own), held_in(own)) for own in sides
    )
    if left_decoder * held >= left * held_decoder:
        return None
    encoder, decoder = (len(own) for own in sides)
    return (
        f"Decoder layers keep {left_decoder / decoder:.3g} of {held_decoder / decoder:.3g} experts, encoder layers "
        f"{left / encoder:.3g} of {held / encoder:.3g}: with fewer than {UNBALANCED_FROM} a layer this costs quality. "
        "--balance 1:1 is safer."
    )


def least_experts(top_k: int, groups: Groups) -> int:
    """Experts that a layer needs so that its router can still pick `top_k` for each token, and as many in each group.

    A router with groups picks the best `chosen` of them first, then experts of those alone: chosen x (experts of a
    group) must not be less than `top_k`.
    """
    return groups.count * max(groups.least, ceil(top_k / groups.chosen))


def held_in(axes: Iterable[Axis]) -> int:
    """Number of experts that the layers hold."""
    return sum(len(axis.ids) for axis in axes)


def parts_of(axes: Sequence[Axis], request: Request) -> dict[str, list[Axis]]:
    """The layers that share one number of experts: each layer alone, those of each side, or all under `"model"`."""
    if request.strategy == "global-threshold":
        return {"model": [*axes]}
    if request.strategy == "per-layer":
        return {axis.name: [axis] for axis in axes}
    return {axis.side: [other for other in axes if other.side == axis.side] for axis in axes}


def counts_by_part(axes: Sequence[Axis], request: Request) -> dict[str, int]:
    """Number of experts to keep in each of `parts_of`.

    With a balance, the number d of decoder experts is the largest that fits. Encoder layers keep floor(balance x d);
    an encoder's whole side floor(balance x L_enc / L_dec x d), L counting layers. A part that would exceed its layers,
    or fall below the minimum, stops there and the other side gets the rest. A model with one side has no balance to
    keep. Numbers are multiples of `Request.step`.

    Raises:
        UsageError: the request leaves too few experts, or asks for more than there are; or a layer holds too few for
            `Request.step`.
    """
    parts, keep, step = parts_of(axes, request), request.keep or 0, request.step
    if (stated := request.per_layer) is not None:
        _check_stated(axes, request, stated)
        return {
            name: sum(min(stated[axis.side], len(axis.ids)) for axis in own) for name, own in parts.items()
        }
    _check_feasible(axes, request, keep)
    has_sides = len({own[0].side for own in parts.values()}) == 2
    scale = {  # experts of the part for each expert of a decoder's part
        name: Fraction(len(own), len(parts.get("decoder", own)))
        * (request.balance if has_sides and own[0].side == "encoder" else 1)
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

    fitting = bisect_right(range(ENOUGH), keep, key=lambda decoder: sum(counts(decoder).values()))
    return counts(fitting - 1)


def _check_feasible(axes: Sequence[Axis], request: Request, keep: int) -> None:
    """Refuse to keep only `keep` experts if the layers need more, with the arithmetic."""
    step, held, lowest = request.step, held_in(axes), fewest(axes, request)
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


def _check_stated(axes: Sequence[Axis], request: Request, per_layer: Mapping[str, int]) -> None:
    """Refuse impossible numbers of `--experts-per-layer`."""
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


def fewest(axes: Sequence[Axis], request: Request) -> int:
    """The fewest experts that may stay in these layers: the minimum of each, or all, in multiples of the step."""
    least, step = ceil(request.minimum / request.step), request.step
    return sum(min(least, len(axis.ids) // step) * step for axis in axes)


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
    for part, axes_of_part in parts_of(axes, request).items() if request.strategy != "per-layer" else ():
        own = axes_of_part, phi, counts[part], request.minimum
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
    removed = held_in(axes) - count // groups * groups
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


@dataclass(frozen=True)
class MemoryFit:
    """The smallest ratio that fits, or the largest one where none does; bytes throughout.

    Attributes:
        ratio: fraction of the held experts to remove; `--ratio` with it keeps as many experts.
        keep: experts that stay, of `held`.
        held: experts that the checkpoint holds.
        dense: everything but experts and routers.
        experts: the kept experts and their routers.
        cache: attention cache.
        activations: encoder and scores.
        budget: the memory.
        load: what decodes in it.
        dtype: type of the weights, as in safetensors; None: as stored.
    """

    ratio: float
    keep: int
    held: int
    dense: int
    experts: int
    cache: int
    activations: int
    budget: int
    load: Load
    dtype: str | None

    @property
    def total(self) -> int:
        """Bytes in use, the margin left out."""
        return self.dense + self.experts + self.cache + self.activations

    @property
    def margin(self) -> int:
        """Bytes to leave free."""
        return margin_bytes(self.budget)

    @property
    def fits(self) -> bool:
        """Whether the memory holds it, and the margin."""
        return self.total <= self.budget - self.margin


def smallest_ratio(
    checkpoint: Checkpoint, budget_bytes: int, load: Load, request: Request, *, dtype: str | None = None
) -> MemoryFit:
    """`nearest_ratio`, if its model fits.

    Raises:
        UsageError: not even the smallest model fits.
    """
    found = nearest_ratio(checkpoint, budget_bytes, load, request, dtype=dtype)
    if not found.fits:
        raise UsageError(
            f"No ratio fits in {bytes_text(budget_bytes)}: with {request.minimum} experts per layer the weights "
            f"take {bytes_text(found.dense + found.experts)}, decoding {bytes_text(found.cache + found.activations)}, "
            "10% stays free.",
            "Give more memory, a smaller --dtype, or a smaller --fit-batch, --fit-beam or --fit-length.",
        )
    return found


def nearest_ratio(
    checkpoint: Checkpoint, budget_bytes: int, load: Load, request: Request, *, dtype: str | None = None
) -> MemoryFit:
    """The fewest experts to remove so that the model fits in `budget_bytes` while it decodes; where none are few
    enough, the most that may be removed.

    Args:
        checkpoint: headers are read, nothing else.
        budget_bytes: the memory.
        load: what decodes.
        request: strategy, balance and minimum of the selection; its counts are ignored. A threshold may keep any
            experts of its layers, so each counts as the largest of these.
        dtype: type of the weights; None: as stored.

    Raises:
        UnsupportedModelError: the family is not declared, or the model has no experts.
    """
    axes, keeping = _keeping(checkpoint, budget_bytes, load, request, dtype)
    counts, free = range(held_in(axes) + 1), budget_bytes - margin_bytes(budget_bytes)
    return keeping(
        bisect_right(counts, free, lo=fewest(axes, request) + 1, key=lambda most: keeping(most).total) - 1
    )


def at_ratios(
    checkpoint: Checkpoint,
    budget_bytes: int,
    load: Load,
    request: Request,
    ratios: Iterable[float],
    *,
    dtype: str | None = None,
) -> Iterator[MemoryFit]:
    """What `prune-experts --ratio` leaves, for each of `ratios` that leaves the router enough; else as `nearest_ratio`.

    Raises:
        UnsupportedModelError: as there.
    """
    axes, keeping = _keeping(checkpoint, budget_bytes, load, request, dtype)
    for ratio in ratios:
        try:
            yield replace(keeping(keep_count(ratio, held_in(axes))), ratio=ratio)
        except UsageError:
            return


def _keeping(
    checkpoint: Checkpoint, budget_bytes: int, load: Load, request: Request, dtype: str | None
) -> tuple[Sequence[Axis], Callable[[int], MemoryFit]]:
    """The experts, and the function from the largest number of experts to keep to the memory of the model."""
    target = None if dtype is None else parse_dtype(dtype)
    layers, axes = checkpoint.require_mixtures(), axes_of(checkpoint, "expert")
    sizes, held = tensor_bytes(checkpoint, target), held_in(axes)
    each = {axis.name: expert_bytes(sizes, layer) for axis, layer in zip(axes, layers, strict=True)}
    dense = sum(sizes.values()) - sum(each[axis.name] * len(axis.ids) for axis in axes)
    cache, activations = decoding_bytes(checkpoint, load, target)
    places = 10 ** max(4, len(str(held)))  # fine enough that `keep_count` gives the same count back

    def keeping(most: int) -> MemoryFit:
        counts = counts_by_part(axes, replace(request, keep=most))
        keep = sum(counts.values())
        ratio = floor((1 - Fraction(keep, held)) * places) / places
        # A threshold may keep the largest experts of its layers.
        experts = sum(
            counts[part] * max(each[axis.name] for axis in own)
            for part, own in parts_of(axes, request).items()
        )
        return MemoryFit(ratio, keep, held, dense, experts, cache, activations, budget_bytes, load, target)

    return axes, keeping


def margin_bytes(budget_bytes: int) -> int:
    """What is left free of a memory."""
    return ceil(MARGIN * budget_bytes)


def explain(fit: MemoryFit) -> Sequence[str]:
    """The arithmetic in plain lines."""
    load = fit.load
    return (
        f"fit {bytes_text(fit.budget)}: dense {bytes_text(fit.dense)} + {fit.keep} experts {bytes_text(fit.experts)}"
        f" + attention cache {bytes_text(fit.cache)} + activations {bytes_text(fit.activations)}"
        f" = {bytes_text(fit.total)}, with {bytes_text(fit.margin)} (10%) left free",
        f"for batch {load.batch}, beam {load.beam}, {load.length} tokens; the smallest ratio is {fit.ratio:g}"
        f" ({fit.keep} of {fit.held} experts stay)",
    )


def fit_payload(fit: MemoryFit) -> dict[str, Any]:
    """The fit as JSON."""
    return {
        "budget_bytes": fit.budget,
        "margin_bytes": fit.margin,
        "dense_bytes": fit.dense,
        "expert_bytes": fit.experts,
        "cache_bytes": fit.cache,
        "activation_bytes": fit.activations,
        "batch": fit.load.batch,
        "beam": fit.load.beam,
        "length": fit.load.length,
        "ratio": fit.ratio,
        "keep": fit.keep,
        "held": fit.held,
    }
