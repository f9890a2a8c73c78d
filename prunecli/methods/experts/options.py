"""Options of `prune-experts` by the kind of model: translation models, or language models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from math import lcm
from typing import TYPE_CHECKING, Literal

from prunecli.architectures.classes import SEQ2SEQ
from prunecli.errors import UsageError
from prunecli.methods.experts.budget import MIN_PER_LAYER, default_balance, least_experts
from prunecli.methods.experts.metrics import WITHOUT_STATISTICS
from prunecli.methods.options import ExpertOptions, Strategy
from prunecli.model.mixtures import predicting_tensors
from prunecli.model.sparse_layer import SparseLayer
from prunecli.selection.select import Budget

if TYPE_CHECKING:
    from prunecli.model.checkpoint import Checkpoint

DEFAULT_RATIO = 0.8
"""Of translation models: the published choice."""
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
    return checkpoint.architecture is None or checkpoint.architecture.auto_class != SEQ2SEQ


def default_ratio(checkpoint: Checkpoint) -> float:
    """Fraction of the experts that goes where no amount is given."""
    return DEFAULT_TEXT_RATIO if of_language_model(checkpoint) else DEFAULT_RATIO


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
    if not 1 <= options.active <= top_k:
        raise UsageError(
            f"`active={options.active}`: the router picks {top_k} experts for each token.",
            f"Give a number from 1 to {top_k}.",
        )
    return tuple(replace(layer, top_k=options.active) for layer in layers)


def request_of(checkpoint: Checkpoint, options: ExpertOptions, layers: Sequence[SparseLayer]) -> Budget:
    """The budget of the options; with `fit`, its ratio is the default one.

    Args:
        layers: see `layers_of`.

    Raises:
        UsageError: several amounts, or a minimum that leaves the router too few experts.
    """
    options.check_amount()
    needed = max(least_experts(layer.top_k, layer.groups) for layer in layers)
    minimum = options.least
    if minimum is None:
        minimum = needed if options.strategy == "per-layer" else max(needed, MIN_PER_LAYER)
    if minimum < needed:
        raise UsageError(f"`least={minimum}`: the router picks {needed} experts for each token.")
    balance = options.balance
    if balance is None and not of_language_model(checkpoint):
        balance = default_balance(layer.original_experts for layer in layers)
    groups = layers[0].groups.count
    return Budget(
        default_ratio(checkpoint) if options.ratio is None and options.count is None else options.ratio,
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
    if options.multiple_of > 1 and options.strategy != "per-layer":
        raise UsageError(
            f"`multiple_of={options.multiple_of}` rounds the number of each layer; `strategy={options.strategy}` gives "
            "none.",
            "Use `strategy=per-layer`.",
        )
    chosen = options.texts or options.sources or options.targets or options.granularity
    if chosen and options.metric in WITHOUT_STATISTICS and not options.constant:
        raise UsageError(
            f"`texts`, `sources`, `targets` and `granularity` choose statistics; `metric={options.metric}` reads none.",
            "Leave one of them out.",
        )
    if options.constant and not is_text:
        raise UsageError("`constant` is for language models; this one translates.", "Leave it out.")
    if not is_text:
        if options.texts:
            raise UsageError(
                "`texts` names texts of language models; statistics of translation are by pairs of languages.",
                "Name languages with `sources` and `targets`.",
            )
        return
    if options.sources or options.targets or options.granularity or options.balance:
        raise UsageError(
            "`sources`, `targets`, `granularity` and `balance` are for translation; this is a language model.",
            "Name the texts whose statistics count with `texts`.",
        )
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
