"""From options to what a selection of experts is asked: in which layers, by what strategy, how many stay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from math import lcm
from typing import TYPE_CHECKING

from prunecli.errors import UsageError
from prunecli.methods.experts.budget import MIN_PER_LAYER, Request, default_balance, keep_count, least_experts
from prunecli.methods.experts.memory_fit import MemoryFit, smallest_ratio
from prunecli.methods.experts.options import ExpertOptions, default_ratio, of_language_model
from prunecli.model.mixtures import predicting_tensors
from prunecli.model.sparse_layer import SparseLayer

if TYPE_CHECKING:
    from prunecli.model.checkpoint import Checkpoint


def layers_of(
    checkpoint: Checkpoint, options: ExpertOptions
) -> tuple[tuple[SparseLayer, ...], dict[str, tuple[int, ...]]]:
    """The layers that experts are chosen in, with the experts per token of the result; and those that are dropped.

    Raises:
        UsageError: layers that there are not would be dropped, or more experts picked for a token than now.
    """
    layers = checkpoint.require_mixtures()
    dropped: dict[str, tuple[int, ...]] = {}
    if options.mtp == "drop":
        dropped = {layer.name: () for layer in layers if layer.is_predicting}
        layers = tuple(layer for layer in layers if not layer.is_predicting)
        if not predicting_tensors(checkpoint, checkpoint.resolved.sizes):
            raise UsageError(
                f"{checkpoint.path} has no layers that predict further tokens.", "Leave --mtp drop out."
            )
    if options.active is None:
        return layers, dropped
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
    return tuple(replace(layer, top_k=options.active) for layer in layers), dropped


def request_of(checkpoint: Checkpoint, options: ExpertOptions, layers: Sequence[SparseLayer]) -> Request:
    """How experts are removed, but for how many.

    Raises:
        UsageError: a minimum that leaves the router too few.
    """
    groups = layers[0].groups.count
    least = max(
        least_experts(layer.top_k, layer.groups.count, layer.groups.chosen, layer.groups.least)
        for layer in layers
    )
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
    step = lcm(groups, options.multiple_of)
    return Request(None, None, options.strategy, balance, minimum, step=step, groups=groups)


def counted_request(
    checkpoint: Checkpoint, options: ExpertOptions, layers: Sequence[SparseLayer]
) -> tuple[Request, MemoryFit | None]:
    """`request_of`, and how many; with the arithmetic where a memory was given.

    Raises:
        UsageError: as `request_of`; several amounts, or one that cannot be.
    """
    amount = options.amount
    if sum(given is not None for given in (amount.ratio, amount.fit, amount.per_layer)) > 1:
        raise UsageError(
            "Give one of --ratio, --fit, --experts-per-layer.", "Each says how many experts stay."
        )
    request = replace(request_of(checkpoint, options, layers), per_layer=amount.per_layer)
    if amount.per_layer is not None:
        return request, None
    held = sum(len(layer.experts) for layer in layers)
    fit = None
    if amount.fit is None:
        keep = keep_count(default_ratio(checkpoint) if amount.ratio is None else amount.ratio, held)
    else:
        fit = smallest_ratio(checkpoint, amount.fit, dtype=options.dtype, request=request, **options.load)
        keep = fit.keep
    return replace(request, keep=keep), fit
