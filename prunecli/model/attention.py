"""The attentions of a checkpoint: which heads each holds, and where they lie in its tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from prunecli.architectures import Architecture
from prunecli.architectures.records import Attention, Stack
from prunecli.errors import CheckpointError
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.declared import count, depth, holds
from prunecli.model.structure import Structure

AttentionKind = Literal["encoder", "decoder", "cross"]
MOST_HEADS = 100_000
"""A config.json that names more is damaged; a list of them would not fit in memory."""

KINDS: tuple[AttentionKind, ...] = get_args(AttentionKind)


@dataclass(frozen=True)
class HeadPlaces:
    """Where the heads of an attention lie in one of its tensors: `records.HeadAxis` of a model.

    Attributes:
        axis: along which they lie one after another.
        blocks: all heads occur on it once for each of these: the width of one head there, relative to the others.
    """

    axis: int
    blocks: tuple[int, ...] = (1,)

    def unit(self, size: int, heads: int) -> int:
        """What the widths in `blocks` are multiples of, on an axis of length `size` that holds `heads` heads."""
        return size // (sum(self.blocks) * heads)


@dataclass(frozen=True)
class AttentionLayer:
    """One attention of the model. Where several query heads share a key/value head, a head here is all of these.

    Attributes:
        name: "model.encoder.layers.0.self_attn".
        kind: self-attention of the encoder or decoder, or cross-attention.
        layer: its number in the stack.
        heads: original ids of the heads that it holds, in the order in which they are stored.
        original_heads: how many heads the original attention had.
        tensors: full names of the tensors that grow with the heads, and where the heads lie.
        output: name of the linear layer whose input is the heads' outputs one after another.
    """

    name: str
    kind: AttentionKind
    layer: int
    heads: tuple[int, ...]
    original_heads: int
    tensors: Mapping[str, HeadPlaces]
    output: str

    @property
    def num_heads(self) -> int:
        """How many it holds."""
        return len(self.heads)


def attention_layers(checkpoint: Checkpoint) -> tuple[AttentionLayer, ...]:
    """Every attention: the encoder's, the decoder's, then cross-attention; by layer.

    Raises:
        UnsupportedModelError: the family is not declared.
        CheckpointError: config.json holds no usable number of heads, or names heads that cannot be.
    """
    family = checkpoint.require_architecture()
    found = [
        _layer(checkpoint, family, stack, attention, number)
        for stack, attention, number in attentions(family, checkpoint.config)
    ]
    return tuple(sorted(found, key=lambda layer: (KINDS.index(layer.kind), layer.layer)))


def attentions(family: Architecture, config: Mapping[str, Any]) -> Iterator[tuple[Stack, Attention, int]]:
    """Stack, attention and number of the layer of every attention that a model of this config has."""
    for stack in family.stacks:
        for number in range(depth(family, config, stack.depth)):
            for attention in stack.attentions:
                yield stack, attention, number


def held_heads(
    family: Architecture, config: Mapping[str, Any], structure: Structure, attention: Attention, name: str
) -> tuple[tuple[int, ...], int]:
    """Original ids of the heads that the attention `name` holds, and how many it had."""
    counted = count(family, config, attention.heads)
    if counted > MOST_HEADS:
        raise CheckpointError(f"config.json: {attention.heads} is {counted}; no model has so many heads")
    return structure.heads.get(name, tuple(range(counted))), structure.original_heads.get(name, counted)


def _layer(
    checkpoint: Checkpoint, family: Architecture, stack: Stack, attention: Attention, number: int
) -> AttentionLayer:
    owner = stack.layers.format(layer=number)
    name = f"{owner}.{attention.name}"
    ids, original = held_heads(family, checkpoint.config, checkpoint.structure, attention, name)
    if len(set(ids)) != len(ids) or not all(0 <= head < original for head in ids):
        raise CheckpointError(
            f"{checkpoint.path}: config.json names heads {list(ids)} of {name}, which had {original}",
            "config.json and the weights are not of one checkpoint; copy both again.",
        )
    axes = {
        f"{owner}.{spec.name}": HeadPlaces(
            spec.heads.axis, tuple(count(family, checkpoint.config, width) for width in spec.heads.blocks)
        )
        for spec in attention.tensors
        if spec.heads is not None and holds(family, checkpoint.config, spec.optional)
    }
    kind: AttentionKind = "cross" if attention.kind == "cross" else stack.side
    return AttentionLayer(name, kind, number, ids, original, axes, f"{owner}.{attention.output}")
