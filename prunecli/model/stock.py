"""Whether a stock class of transformers can run a reduced model: what config.json then says, or why none can."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from prunecli.architectures import Architecture
from prunecli.architectures.mixtures import ONE_COUNT
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.declared import TIE_KEY, Sizes
from prunecli.model.depth import layers_left, renaming_of
from prunecli.model.embedding import can_untie
from prunecli.model.layout import ModelLayout
from prunecli.model.mixtures import stated_counts
from prunecli.model.parts import AttentionLayer, FfnLayer
from prunecli.model.probe import UNSTATED, template_of
from prunecli.model.quantised import method_of
from prunecli.model.structure import Structure


@dataclass(frozen=True)
class StockSupport:
    """Whether plain transformers opens a result.

    Attributes:
        config: what the stock config holds instead of the source's values; empty where there is none.
        reason: why there is none; None: there is.
        nearest: the choice that comes nearest and has one; None: there is none, or none is needed.
        is_fitted: whether there is none for the numbers of experts alone, which prunecli gives each layer of the stock
            class; `config` then holds the rest.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    reason: str | None = None
    nearest: str | None = None
    is_fitted: bool = False

    @property
    def is_stock(self) -> bool:
        """Whether there is a stock config."""
        return self.reason is None

    @property
    def line(self) -> str:
        """Sentence for the user."""
        if self.reason is None:
            return "A stock model: plain transformers opens it."
        nearest = f"; {self.nearest} would give one" if self.nearest else ""
        return f"Not a stock model: {self.reason}{nearest}."

    def to_json(self) -> dict[str, Any]:
        """For the JSON of a command."""
        return {"is_stock": self.is_stock, "reason": self.reason, "nearest": self.nearest}


def stock_support(source: Checkpoint, structure: Structure) -> StockSupport:
    """Whether a stock config can express a model of this structure that is made of `source`.

    Fewer layers are a stock model of that many. So is the same number of experts, of heads where config.json also
    holds their width, and of hidden units in every layer; a cached embedding is a stock table.

    Raises:
        UnsupportedModelError: its class says nothing.
        CheckpointError: config.json lacks a size, or a layer an expert.
    """
    result = source.resolved.changed(structure)
    if result.family.stock_fault is not None:
        return StockSupport(reason=result.family.stock_fault)
    parts = [
        _experts(source, result),
        _heads(result),
        _attentions(result),
        _ffns(result),
        _embeddings(result),
    ]
    config = {key: value for part in parts for key, value in part.config.items()}
    faults = [part for part in parts if part.reason is not None]
    if not faults:
        return StockSupport(config)
    reasons = ", and ".join(str(part.reason) for part in faults)
    nearest, is_fitted = faults[0].nearest if len(faults) == 1 else None, all(f.is_fitted for f in faults)
    return StockSupport(config if is_fitted else {}, reasons, nearest, is_fitted)


def uniform_heads(source: Checkpoint) -> tuple[int, ...]:
    """How many heads every attention may keep in a stock config of the family, ascending; empty where it must keep all.

    Heads are key/value heads where several query heads share one.

    Raises:
        UnsupportedModelError: its class says nothing.
    """
    family = source.require_architecture()
    sizes = source.layout.sizes
    if family.stock_fault is not None or family.head_width is None:
        return ()
    counted = sizes.count(_heads_key(family))
    return tuple(kept for kept in range(1, counted + 1) if not _undivided(sizes, kept, counted))


def _heads_key(family: Architecture) -> str:
    """The config key of the number of heads: of the first stack that has attentions."""
    return next(one.heads for stack in family.stacks for one in stack.attentions)


def _experts(source: Checkpoint, result: ModelLayout) -> StockSupport:
    mixture = result.family.mixture
    if mixture is None or not source.mixtures:
        return StockSupport()
    if result.structure.constants:
        return StockSupport(
            reason="constants stand for experts",
            nearest="`prune-experts` without --constant-experts",
            is_fitted=True,
        )
    # A layer that predicts further tokens may be gone as a whole: it keeps none.
    left = layers_left(source.resolved.sizes, source.structure, result.structure)
    gone = {
        stack.side
        for stack in result.family.stacks
        if len(left[stack.side]) < source.resolved.sizes.depth(stack)
    }
    rename = renaming_of(result.family, {side: left[side] for side in gone})
    counts = [
        len(result.structure.units(name, "expert", layer.num_experts).kept)
        for layer in source.mixtures
        if (name := rename(layer.name)) is not None
    ]
    kept = {count for count in counts if count}
    if not kept:  # every layer with experts is gone
        return StockSupport()
    if len(kept) > 1:
        reason = f"experts differ between layers ({_range(kept)})"
        sides = {layer.side for layer in source.mixtures}
        nearest = f"`prune-experts {'--balance 1:1' if len(sides) > 1 else '--strategy per-layer'}`"
        # Where prunecli does not decode them, transformers makes as many quantised experts as config.json says.
        may_differ = source.model_type not in ONE_COUNT and (
            not method_of(source.config) or source.runs_by_layer
        )
        # JetMoE's layers have two, of which prunecli takes both from one model.
        is_single = len({(layer.side, layer.layer) for layer in source.mixtures}) == len(source.mixtures)
        is_fitted = may_differ and is_single
        return StockSupport(reason=reason, nearest=nearest, is_fitted=is_fitted)
    before, after = source.mixtures[0].num_experts, kept.pop()
    keys = tuple(stated_counts(result.sizes, mixture)) or mixture.counts[:1]
    config = dict.fromkeys(keys, after)
    if mixture.capacity is not None and result.sizes.states(mixture.capacity):
        # As many tokens of a sequence find a place as before.
        config[mixture.capacity] = math.ceil(result.sizes.even(mixture.capacity) * before / after)
    return StockSupport(config)


def _heads(result: ModelLayout) -> StockSupport:
    family, sizes = result.family, result.sizes
    attentions = result.own_attentions
    kept = {layer.count for layer in attentions}
    # A table of positions that all layers share has its columns in the order of the original heads.
    if all(
        layer.is_whole if layer.spec.position_bias else layer.count == layer.stated for layer in attentions
    ):
        return StockSupport()
    if (width := family.head_width) is None:
        return StockSupport(
            reason=f"heads were removed, and a config of type {family.model_type} cannot say how many",
            is_fitted=_may_differ(family, attentions[0].spec.heads, kept),
        )
    counted = sizes.count(_heads_key(family))
    heads_each = next(iter(kept))
    if len(kept) > 1:
        reason: str | None = f"heads differ between layers ({_range(kept)})"
    else:
        reason = _undivided(sizes, heads_each, counted) if heads_each else "no heads are left"
    if reason is not None:
        return StockSupport(
            reason=reason,
            nearest="`prune-heads --uniform`",
            is_fitted=_may_differ(family, attentions[0].spec.heads, kept),
        )
    heads = {key: sizes.count(key) * heads_each // counted for key in family.head_counts}
    return StockSupport({**heads, width: sizes.count(width)})


def _may_differ(family: Architecture, key: str, kept: Collection[int]) -> bool:
    """Whether layers may keep these numbers of what this key of the config counts."""
    return bool(family.found.may_keep(key, kept))


def _range(numbers: Collection[int]) -> str:
    return " to ".join(dict.fromkeys((f"{min(numbers)}", f"{max(numbers)}")))


def _undivided(sizes: Sizes, kept: int, counted: int) -> str | None:
    """Why transformers refuses a config with `kept` of its `counted` heads, though it states their width."""
    family = sizes.family
    if family.heads_divide is None:
        return None
    size = sizes.count(family.heads_divide)
    heads = sizes.count(family.head_counts[0]) * kept // counted
    if size % heads == 0:
        return None
    return f"transformers refuses {heads} heads of a layer where {family.heads_divide} is {size}, no multiple of it"


def _gone(result: ModelLayout, what: str, part: AttentionLayer | FfnLayer, removable: bool) -> StockSupport:
    """A part is removed or shared, which prunecli can do within the stock class if the files have its modules too."""
    found = result.family.found
    return StockSupport(
        reason=f"{what} are {'removed' if part.removed else 'shared'}, which no config.json can say",
        is_fitted=(removable or not part.removed)
        and found.probed.trial.turned.isdisjoint(map(template_of, part.stock_tensors)),
    )


def _attentions(result: ModelLayout) -> StockSupport:
    for layer in result.attentions:
        if not layer.has_tensors:
            return _gone(result, "attentions", layer, layer.spec.removable)
    return StockSupport()


def _ffns(result: ModelLayout) -> StockSupport:
    widths: dict[str, set[int]] = {}
    for layer in result.ffns:
        if not layer.has_tensors:
            return _gone(result, "FFNs", layer, layer.spec.removable)
        if layer.carriers:  # those of experts are alike in every layer
            widths.setdefault(layer.spec.width, set()).add(layer.count)
    for key, stack_widths in widths.items():
        is_unstated = key == UNSTATED and bool(result.structure.widths)
        if is_unstated or len(stack_widths) > 1:
            what = "no key says how wide FFNs are" if is_unstated else "the widths of FFNs differ"
            return StockSupport(
                reason=f"{what} ({_range(stack_widths)})",
                is_fitted=_may_differ(result.family, key, stack_widths),
            )
    return StockSupport(
        {key: stack_widths.pop() for key, stack_widths in widths.items() if result.structure.widths}
    )


def _embeddings(result: ModelLayout) -> StockSupport:
    family, change = result.family, result.structure.embedding
    if change.is_stock:
        return StockSupport()
    if change.output is not None and change.output.map_dim is not None:
        return StockSupport(reason="the output embeddings are factorised", is_fitted=True)
    config = {TIE_KEY: False} if change.output is not None and can_untie(family) else {}
    reason = nearest = None
    if change.output is not None and not config:
        reason = (
            f"the output layer has a table of its own, which a config of type {family.model_type} cannot say"
        )
    elif change.unit is not None:
        reason, nearest = "the input embeddings are factorised", "`factorize-embeddings --cache`"
    return StockSupport(config, reason, nearest, is_fitted=True)
