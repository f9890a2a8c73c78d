"""The attentions of a checkpoint: which heads each holds, and where they lie in its tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from prunecli.architectures import FAMILIES, REDUCED_PREFIX
from prunecli.architectures.records import Attention, Stack
from prunecli.errors import CheckpointError
from prunecli.model.declared import Sizes
from prunecli.model.structure import Structure

AttentionKind = Literal["encoder", "decoder", "cross"]
MOST_HEADS = 100_000
"""A config.json that names more is damaged; a list of them would not fit in memory."""

KINDS: tuple[AttentionKind, ...] = get_args(AttentionKind)
KIND_NAMES: Mapping[str, str] = {
    "encoder": "encoder self-attention",
    "decoder": "decoder self-attention",
    "cross": "cross-attention",
}


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
        stated_heads: how many config.json counts for it.
        original_heads: how many heads the original attention had.
        tensors: full names of the tensors that grow with the heads, and where the heads lie.
        output: name of the linear layer whose input is the heads' outputs one after another.
        stack: the record of its stack.
        spec: its record.
    """

    name: str
    kind: AttentionKind
    layer: int
    heads: tuple[int, ...]
    stated_heads: int
    original_heads: int
    tensors: Mapping[str, HeadPlaces]
    output: str
    stack: Stack = field(repr=False)
    spec: Attention = field(repr=False)

    @property
    def is_whole(self) -> bool:
        """Whether it holds every head that config.json counts, in order."""
        return self.heads == tuple(range(self.stated_heads))

    @property
    def num_heads(self) -> int:
        """How many it holds."""
        return len(self.heads)


def resolve_attentions(sizes: Sizes, structure: Structure) -> tuple[AttentionLayer, ...]:
    """Every attention: the encoder's, the decoder's, then cross-attention; by layer.

    Raises:
        CheckpointError: config.json holds no usable number of heads, or names heads that cannot be.
    """
    layers = [
        _layer(sizes, structure, stack, attention, number)
        for stack in sizes.family.stacks
        for number in range(sizes.depth(stack))
        for attention in stack.attentions
    ]
    return tuple(sorted(layers, key=lambda layer: (KINDS.index(layer.kind), layer.layer)))


def _layer(
    sizes: Sizes, structure: Structure, stack: Stack, attention: Attention, number: int
) -> AttentionLayer:
    owner = stack.layers.format(layer=number)
    name = f"{owner}.{attention.name}"
    counted = sizes.count(attention.heads)
    if counted > MOST_HEADS:
        raise CheckpointError(f"config.json: {attention.heads} is {counted}; no model has so many heads")
    ids = structure.heads.get(name, tuple(range(counted)))
    original = structure.original_heads.get(name, counted)
    if len(set(ids)) != len(ids) or not all(0 <= head < original for head in ids):
        raise CheckpointError(
            f"config.json names heads {list(ids)} of {name}, which had {original}",
            "config.json and the weights are not of one checkpoint; copy both again.",
        )
    axes = {
        f"{owner}.{spec.name}": HeadPlaces(spec.heads.axis, tuple(map(sizes.count, spec.heads.blocks)))
        for spec in attention.tensors
        if spec.heads is not None and sizes.holds(spec.optional)
    }
    kind: AttentionKind = "cross" if attention.kind == "cross" else stack.side
    output = f"{owner}.{attention.output}"
    return AttentionLayer(name, kind, number, ids, counted, original, axes, output, stack, attention)


def kind_and_layer(model_type: str, attention: str) -> tuple[str, int]:
    """Kind and layer of an attention by its name; ("heads", 0) where the family does not know it."""
    family = FAMILIES.get(model_type.removeprefix(REDUCED_PREFIX))
    for stack in () if family is None else family.stacks:
        for record in stack.attentions:
            pattern = re.escape(f"{stack.layers}.{record.name}").replace(r"\{layer\}", r"(\d{1,6})")
            if match := re.fullmatch(pattern, attention):
                return ("cross" if record.kind == "cross" else stack.side), int(match[1])
    return "heads", 0
