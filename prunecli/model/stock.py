"""Whether a stock class of transformers can run a reduced model: what config.json then says, or why none can."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from prunecli.architectures import Architecture
from prunecli.model.attention import attentions, held_heads
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.declared import TIE_KEY, count
from prunecli.model.ffn import declared_ffns
from prunecli.model.layout import held_sparse_layers
from prunecli.model.structure import Structure


@dataclass(frozen=True)
class Verdict:
    """Whether plain transformers opens a result.

    Attributes:
        config: what the stock config holds instead of the source's values; empty where there is none.
        reason: why there is none; None: there is.
        nearest: the choice that comes nearest and has one; None: there is none, or none is needed.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    reason: str | None = None
    nearest: str | None = None

    @property
    def is_stock(self) -> bool:
        """Whether there is a stock config."""
        return self.reason is None

    @property
    def line(self) -> str:
        """The same in words."""
        if self.reason is None:
            return "A stock model: plain transformers opens it."
        nearest = f"; {self.nearest} would give one" if self.nearest else ""
        return f"Not a stock model: {self.reason}{nearest}."

    def to_json(self) -> dict[str, Any]:
        """For the JSON of a command."""
        return {"is_stock": self.is_stock, "reason": self.reason, "nearest": self.nearest}


def stock_verdict(source: Checkpoint, structure: Structure) -> Verdict:
    """Whether a stock config can express a model of this structure that is made of `source`.

    The same number of experts, of heads where config.json also holds their width, and of hidden units in every layer
    is a stock model of that many, and a cached embedding a stock table.

    Raises:
        UnsupportedModelError: the family is not declared.
        CheckpointError: config.json lacks a size, or a layer an expert.
    """
    family = source.require_architecture()
    if family.stock_fault is not None:
        return Verdict(reason=family.stock_fault)
    parts = [
        _experts(source, family, structure),
        _heads(source, family, structure),
        _ffns(source, family, structure),
        _embeddings(family, structure),
    ]
    faults = [part for part in parts if part.reason is not None]
    if faults:
        reasons = ", and ".join(str(part.reason) for part in faults)
        return Verdict(reason=reasons, nearest=faults[0].nearest if len(faults) == 1 else None)
    return Verdict({key: value for part in parts for key, value in part.config.items()})


def uniform_heads(source: Checkpoint) -> tuple[int, ...]:
    """How many heads every attention may keep in a stock config of the family, ascending; empty where it must keep all.

    Heads are key/value heads where several query heads share one.

    Raises:
        UnsupportedModelError: the family is not declared.
    """
    family = source.require_architecture()
    if family.head_width is None or family.stock_fault is not None:
        return ()
    counted = count(family, source.config, family.stacks[0].attentions[0].heads)
    return tuple(
        kept for kept in range(1, counted + 1) if not _undivided(family, source.config, kept, counted)
    )


def _experts(source: Checkpoint, family: Architecture, structure: Structure) -> Verdict:
    if not family.expert_count:
        return Verdict()
    counts = {
        len(structure.experts[layer.name]) if layer.name in structure.experts else layer.num_experts
        for layer in held_sparse_layers(source)
    }
    if len(counts) > 1:
        reason = f"experts differ between layers ({min(counts)} to {max(counts)})"
        return Verdict(reason=reason, nearest="`prune-experts --balance 1:1`")
    return Verdict(dict.fromkeys(family.expert_count, counts.pop()) if counts else {})


def _heads(source: Checkpoint, family: Architecture, structure: Structure) -> Verdict:
    config, kept, is_whole = source.config, set[int](), True
    for stack, attention, number in attentions(family, config):
        name = f"{stack.layers.format(layer=number)}.{attention.name}"
        heads, _ = held_heads(family, config, structure, attention, name)
        counted = count(family, config, attention.heads)
        # A table of positions that all layers share has its columns in the order of the original heads.
        moved = attention.position_bias and heads != tuple(range(counted))
        is_whole &= len(heads) == counted and not moved
        kept.add(len(heads))
    if is_whole:
        return Verdict()
    if family.head_width is None:
        return Verdict(reason=f"heads are gone, and a config of type {family.model_type} cannot say how many")
    counted = count(family, config, family.stacks[0].attentions[0].heads)
    if len(kept) > 1 or kept == {0}:
        reason = f"heads differ between layers ({_range(kept)})" if len(kept) > 1 else "no heads are left"
        return Verdict(reason=reason, nearest="`prune-heads --uniform`")
    left = kept.pop()
    if fault := _undivided(family, config, left, counted):
        return Verdict(reason=fault, nearest="`prune-heads --uniform`")
    stated = {family.head_width: count(family, config, family.head_width)}
    return Verdict(_head_counts(family, config, left, counted) | stated)


def _range(numbers: Collection[int]) -> str:
    return f"{min(numbers)} to {max(numbers)}"


def _head_counts(family: Architecture, config: Mapping[str, Any], left: int, counted: int) -> dict[str, int]:
    return {key: count(family, config, key) * left // counted for key in family.head_counts}


def _undivided(family: Architecture, config: Mapping[str, Any], left: int, counted: int) -> str | None:
    """Why transformers refuses a config with `left` of its `counted` heads, though it states their width."""
    if family.heads_divide is None:
        return None
    size = count(family, config, family.heads_divide)
    heads = count(family, config, family.head_counts[0]) * left // counted
    if size % heads == 0:
        return None
    return f"transformers refuses {heads} heads of a layer where {family.heads_divide} is {size}, no multiple of it"


def _ffns(source: Checkpoint, family: Architecture, structure: Structure) -> Verdict:
    keys = {stack.side: stack.ffn.width for stack in family.stacks}
    widths: dict[str, set[int]] = {}
    for layer in declared_ffns(family, source.config, structure):
        if layer.removed or layer.is_shared:
            return Verdict(
                reason=f"FFNs are {'gone' if layer.removed else 'shared'}, which no config.json can say"
            )
        widths.setdefault(keys[layer.side], set()).add(layer.width)
    for found in widths.values():
        if len(found) > 1:
            return Verdict(reason=f"the widths of FFNs differ ({_range(found)})")
    return Verdict({key: found.pop() for key, found in widths.items() if structure.ffn})


def _embeddings(family: Architecture, structure: Structure) -> Verdict:
    change = structure.embedding
    if change.is_stock:
        return Verdict()
    if change.output is None:
        return Verdict(reason="the input embeddings are factorised", nearest="`factorize-embeddings --cache`")
    if change.output.map_dim is not None:
        return Verdict(reason="the output embeddings are factorised")
    assert family.embedding is not None
    if not family.embedding.apart:
        return Verdict(
            reason=f"the output layer has a table of its own, which a config of type {family.model_type} cannot say"
        )
    if change.unit is not None:
        return Verdict(reason="the input embeddings are factorised", nearest="`factorize-embeddings --cache`")
    return Verdict({TIE_KEY: False})
