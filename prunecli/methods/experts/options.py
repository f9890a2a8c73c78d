"""Options of `prune-experts` by the kind of model: translation models, or language models."""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil, floor, lcm
from typing import Any, Literal

from prunecli.errors import UsageError
from prunecli.methods.experts.metrics import WITHOUT_STATISTICS
from prunecli.methods.options import ExpertOptions, Strategy
from prunecli.model.axes import Axis
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.cost import Load, decoding_bytes, expert_bytes, tensor_bytes
from prunecli.model.find_axes import axes_of
from prunecli.model.mixtures import predicting_tensors
from prunecli.model.sparse_layer import SparseLayer
from prunecli.selection.select import Budget, Kept, held_in
from prunecli.tensors.dtypes import parse_dtype
from prunecli.tensors.quantities import bytes_text

DEFAULT_TEXT_RATIO = 0.25
"""Of language models: the most that costs their tasks little (2510.13999, Table 2)."""
SCOPES: Mapping[Strategy, Literal["axis", "side", "model"]] = {
    "per-layer": "axis",
    "side-threshold": "side",
    "global-threshold": "model",
}
"""Strategy -> `Budget.scope`."""


def of_language_model(checkpoint: Checkpoint) -> bool:
    """Whether its statistics are of texts, not of pairs of languages: of every family but those that translate."""
    return checkpoint.runs_stock


def layers_of(checkpoint: Checkpoint, options: ExpertOptions) -> tuple[SparseLayer, ...]:
    """The layers that experts are chosen in, with the experts per token of the result.

    Raises:
        UsageError: the model has no layers that `mtp` could drop, or `active` is more than now.
    """
    layers = checkpoint.require_mixtures()
    if options.mtp == "drop":
        layers = tuple(layer for layer in layers if not layer.is_predicting)
        if not predicting_tensors(checkpoint, checkpoint.resolved.sizes):
            raise UsageError(
                f"{checkpoint.path} has no layers that predict further tokens.", "Leave `mtp=drop` out."
            )
    if options.active is None:
        return layers
    mixture, top_k = checkpoint.resolved.family.mixture, layers[0].top_k
    if mixture is None or isinstance(mixture.top_k, int):
        raise UsageError(
            f"`active={options.active}`: a router of type {checkpoint.model_type} always picks {top_k}.",
            "Leave `active` out.",
        )
    if options.active > top_k:
        raise UsageError(
            f"`active={options.active}`: the router picks {top_k} experts for each token.",
            f"Give a number from 1 to {top_k}.",
        )
    return tuple(replace(layer, top_k=options.active) for layer in layers)


def request_of(checkpoint: Checkpoint, options: ExpertOptions, layers: Sequence[SparseLayer]) -> Budget:
    """The budget of the options, but for `fit`.

    Args:
        layers: see `layers_of`.

    Raises:
        UsageError: a minimum that leaves the router too few experts.
    """
    needed = max(layer.groups.needed(layer.top_k) for layer in layers)
    minimum = options.least
    if minimum is None:
        minimum = needed if options.strategy == "per-layer" else max(needed, MIN_PER_LAYER)
    if minimum < needed:
        raise UsageError(f"`least={minimum}`: the router picks {needed} experts for each token.")
    balance = options.balance
    if balance is None and not of_language_model(checkpoint):
        balance = default_balance(layer.original_experts for layer in layers)
    groups = layers[0].groups.count
    default = DEFAULT_TEXT_RATIO if of_language_model(checkpoint) else options.DEFAULT_RATIO
    return Budget(
        options.ratio if options.has_amount else default,
        options.count,
        options.experts_per_layer,
        SCOPES[options.strategy],
        balance or Fraction(1),
        minimum,
        lcm(groups, options.multiple_of),
        groups=groups,
    )


def check_kind(options: ExpertOptions, is_text: bool) -> None:
    """Refuse what only the other kind of model takes.

    Raises:
        UsageError: with what this kind takes instead.
    """
    chosen = options.texts or options.sources or options.targets or options.granularity
    if chosen and options.metric in WITHOUT_STATISTICS and not options.constant:
        raise UsageError(
            f"`texts`, `sources`, `targets` and `granularity` choose statistics; `metric={options.metric}` reads none.",
            "Leave one of them out.",
        )
    own, others = ("texts", "constant"), ("sources", "targets", "granularity", "balance")
    kind = "translation; this is a language model" if is_text else "language models; this one translates"
    named = "`texts`" if is_text else "`sources` and `targets`"
    remedy = f"Choose the statistics that count with {named}."
    options.refuse(others if is_text else own, f"is for {kind}.", remedy)
    if not is_text:
        return
    if options.strategy == "side-threshold":
        raise UsageError(
            "`strategy=side-threshold` is for encoders and decoders; this is a language model.",
            "Use `strategy=global-threshold`.",
        )
    if options.texts and options.keep is not None and not options.constant:
        raise UsageError("`texts` chooses statistics; `keep` takes none.", "Leave one of them out.")
    counts = options.experts_per_layer
    if counts is not None and len(set(counts.values())) > 1:
        raise UsageError(
            "`experts_per_layer=E,D` is for encoders and decoders; this is a language model.",
            "Give one number.",
        )


MARGIN = Fraction(1, 10)
"""Part of the memory that is left free."""
UNBALANCED = Fraction(3)
UNBALANCED_FROM = 128
"""Experts per layer from which the paper's 3:1 is the default: as many as the only model that it was found best for.
With 32 and 64 a layer, 1:1 is as good or better at every ratio (docs/guides/quality.md)."""
MIN_PER_LAYER = 4
"""Experts that the paper keeps at least in each layer under a threshold."""


def balance_text(balance: Fraction) -> str:
    """3 -> `3:1`."""
    return f"{balance.numerator}:{balance.denominator}"


def default_balance(originals: Iterable[int]) -> Fraction:
    """Encoder experts per decoder expert for layers that had these numbers of experts originally."""
    return UNBALANCED if max(originals, default=0) >= UNBALANCED_FROM else Fraction(1)


def starved(axes: Sequence[Axis], kept: Kept) -> str | None:
    """The warning if decoder layers lose a larger part of their experts than encoder layers, which costs quality.

    There is no warning if the model has one side, or as many experts in a layer as the paper's model.
    """
    sides = [[axis for axis in axes if axis.side == side] for side in ("encoder", "decoder")]
    if not all(sides) or default_balance(axis.original for axis in axes) == UNBALANCED:
        return None
    (left, held), (left_decoder, held_decoder) = (
        (sum(len(kept[axis.name]) for axis in own), held_in(own)) for own in sides
    )
    if left_decoder * held >= left * held_decoder:
        return None
    encoder, decoder = map(len, sides)
    return (
        f"Decoder layers keep {left_decoder / decoder:.3g} of {held_decoder / decoder:.3g} experts, encoder layers "
        f"{left / encoder:.3g} of {held / encoder:.3g}: with fewer than {UNBALANCED_FROM} a layer this costs quality. "
        "`balance=1:1` is safer."
    )


@dataclass(frozen=True)
class MemoryFit:
    """The memory that a model needs without some of its experts; bytes throughout.

    It is that of the weights in the target type, what decoding needs (both by the formulas of `model.cost`), and a
    margin of 10 % for the context of the device and for fragmentation.

    Attributes:
        budget_bytes: the memory.
        margin_bytes: part of the memory to leave free.
        dense_bytes: everything but experts and routers.
        expert_bytes: the kept experts and their routers.
        cache_bytes: attention cache.
        activation_bytes: encoder and scores.
        ratio: fraction of the held experts that is removed.
        keep: number of experts that stay, of `held`.
        held: number of experts that the checkpoint holds.
    """

    budget_bytes: int
    margin_bytes: int
    dense_bytes: int
    expert_bytes: int
    cache_bytes: int
    activation_bytes: int
    ratio: float
    keep: int
    held: int

    @property
    def total(self) -> int:
        """Bytes in use, without the margin."""
        return self.dense_bytes + self.expert_bytes + self.cache_bytes + self.activation_bytes

    @property
    def fits(self) -> bool:
        """Whether the memory holds the model and the margin."""
        return self.total <= self.budget_bytes - self.margin_bytes


def smallest_ratio(
    checkpoint: Checkpoint, budget_bytes: int, load: Load, budget: Budget, *, dtype: str | None
) -> MemoryFit:
    """The first of `memory_fits`, if its model fits.

    Raises:
        UsageError: not even the smallest model fits.
    """
    found = memory_fits(checkpoint, budget_bytes, load, budget, dtype=dtype)[0]
    if not found.fits:
        raise UsageError(
            f"No ratio fits in {bytes_text(budget_bytes)}: with {budget.least} experts per layer the weights "
            f"take {bytes_text(found.dense_bytes + found.expert_bytes)}, decoding "
            f"{bytes_text(found.cache_bytes + found.activation_bytes)}, "
            "with a reserve of 10%.",
            "Give more memory, a smaller `dtype`, or a smaller `fit_batch`, `fit_beam` or `fit_length`.",
        )
    return found


def memory_fits(
    checkpoint: Checkpoint,
    budget_bytes: int,
    load: Load,
    budget: Budget,
    ratios: Iterable[float] = (),
    *,
    dtype: str | None,
) -> list[MemoryFit]:
    """The memory of a model without some of its experts.

    First that of the smallest ratio whose model fits in `budget_bytes` while it decodes; if none fits, of the largest
    ratio. Then that after `prune-experts --ratio`, for each of `ratios` that leaves the router enough experts.

    Args:
        checkpoint: only its headers are read.
        budget_bytes: the memory.
        load: the sentences that decode.
        budget: scope, balance and minimum; its amount is ignored. A threshold may keep any experts of its layers, so
            each expert counts as the largest of these.
        dtype: type of the weights. If None, as stored.

    Raises:
        UnsupportedModelError: its class says nothing, or the model has no experts.
    """
    target = None if dtype is None else parse_dtype(dtype)
    layers, axes = checkpoint.require_mixtures(), axes_of(checkpoint, "expert")
    sizes, held = tensor_bytes(checkpoint, target), held_in(axes)
    each = {axis.name: expert_bytes(sizes, layer) for axis, layer in zip(axes, layers, strict=True)}
    dense = sum(sizes.values()) - sum(each[axis.name] * axis.count for axis in axes)
    cache, activations = decoding_bytes(checkpoint, load, target)
    digits = 10 ** max(4, len(str(held)))  # enough that the ratio gives the same count back

    def keeping(most: int) -> MemoryFit:
        counts = replace(budget, ratio=None, count=held - most, keep=None).shared_out(axes)
        keep = sum(counts.values())
        ratio = floor((1 - Fraction(keep, held)) * digits) / digits
        # A threshold may keep the largest experts of its layers.
        experts = sum(
            counts[part] * max(each[axis.name] for axis in own) for part, own in budget.parts(axes).items()
        )
        return MemoryFit(budget_bytes, margin, dense, experts, cache, activations, ratio, keep, held)

    margin, lowest = margin_bytes(budget_bytes), budget.lowest(axes) + 1
    free = budget_bytes - margin
    most = bisect_right(range(held + 1), free, lo=lowest, key=lambda most: keeping(most).total) - 1
    found = [keeping(most)]
    with suppress(UsageError):
        for ratio in ratios:
            found.append(replace(keeping(held - Budget(ratio).removed(axes)), ratio=ratio))
    return found


def margin_bytes(budget_bytes: int) -> int:
    """Bytes of a memory that are left free."""
    return ceil(MARGIN * budget_bytes)


def explain(fit: Mapping[str, Any]) -> Sequence[str]:
    """The arithmetic of a `MemoryFit` and its load in plain lines."""
    names = ("dense", "expert", "cache", "activation")
    dense, experts, cache, activations = (bytes_text(fit[f"{name}_bytes"]) for name in names)
    total = sum(fit[f"{name}_bytes"] for name in names)
    return (
        f"fit {bytes_text(fit['budget_bytes'])}: dense {dense} + {fit['keep']} experts {experts}"
        f" + attention cache {cache} + activations {activations}"
        f" = {bytes_text(total)}, with {bytes_text(fit['margin_bytes'])} (10%) left free",
        f"for batch {fit['batch']}, beam {fit['beam']}, {fit['length']} tokens; the smallest ratio is {fit['ratio']:g}"
        f" ({fit['keep']} of {fit['held']} experts kept)",
    )
