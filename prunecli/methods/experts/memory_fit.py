"""The smallest ratio whose model fits in a given memory, with the arithmetic behind it.

Memory = weights in the target type + what decoding holds at a stated batch, beam and length (both by the formulas of
`model.cost`) + a margin of 10 % of the memory, for the device's own context and for fragmentation.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil, floor
from typing import TYPE_CHECKING, Any

from prunecli.errors import UsageError
from prunecli.methods.experts.budget import (
    Request,
    counts_by_part,
    fewest,
    held_in,
    keep_count,
    parts_of,
)
from prunecli.model.axes import Axis
from prunecli.model.cost import Load, decoding_bytes, expert_bytes, tensor_bytes, usual_load
from prunecli.model.find_axes import axes_of
from prunecli.tensors.dtypes import parse_dtype
from prunecli.tensors.quantities import bytes_text

if TYPE_CHECKING:
    from prunecli.model.checkpoint import Checkpoint

MARGIN = Fraction(1, 10)
"""Part of the memory that is left free."""


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
        margin: left free.
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
    margin: int
    budget: int
    load: Load
    dtype: str | None

    @property
    def total(self) -> int:
        """Bytes in use, the margin left out."""
        return self.dense + self.experts + self.cache + self.activations

    @property
    def fits(self) -> bool:
        """Whether the memory holds it, and the margin."""
        return self.total <= self.budget - self.margin


def smallest_ratio(
    checkpoint: Checkpoint,
    budget_bytes: int,
    *,
    dtype: str | None = None,
    request: Request | None = None,
    **load: int,
) -> MemoryFit:
    """As `nearest_ratio`, where there is one that fits.

    Args:
        checkpoint, budget_bytes, dtype, request: as there.
        load: `batch`, `beam` and `length`; else as `usual_load`.

    Raises:
        UsageError: not even the smallest model fits.
    """
    request = request or Request()
    found = nearest_ratio(checkpoint, budget_bytes, usual_load(checkpoint, **load), request, dtype=dtype)
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
    counts, room = range(held_in(axes) + 1), budget_bytes - margin_bytes(budget_bytes)
    return keeping(
        bisect_right(counts, room, lo=fewest(axes, request) + 1, key=lambda most: keeping(most).total) - 1
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
    rest = *decoding_bytes(checkpoint, load, target), margin_bytes(budget_bytes), budget_bytes, load, target
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
        return MemoryFit(ratio, keep, held, dense, experts, *rest)

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
