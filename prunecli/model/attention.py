"""The attentions of a checkpoint: which heads each holds, and where they lie in its tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from prunecli.architectures import FAMILIES, REDUCED_PREFIX
from prunecli.architectures.records import Attention, Stack
from prunecli.errors import CheckpointError
from prunecli.model.axes import Carrier
from prunecli.model.declared import Sizes, value_of
from prunecli.model.ffn import Owned, own_norms
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
class AttentionLayer(Owned):
    """One attention of the model. Where several query heads share a key/value head, a head here is all of these.

    Attributes:
        name: "model.encoder.layers.0.self_attn".
        kind: self-attention of the encoder or decoder, or cross-attention.
        layer: its number in the stack.
        heads: original ids of the heads that it holds, in the order in which they are stored; none where it is removed.
        stated_heads: how many config.json counts for it.
        original_heads: how many heads the original attention had.
        tensors: full names, in its own layer, of the tensors that grow with the heads, and where the heads lie.
        output: name of the linear layer whose input is the heads' outputs one after another.
        stack: the record of its stack.
        spec: its record.
        owner: name of the attention whose tensors it runs: its own, but where it is shared.
        removed: whether it is gone, together with its norms.
        shared_tensors: where it is shared, full names in its own layer -> those of the tensors that it runs. A table of
            positions that all layers use is none of them.
        window: what it sees, in the words of config.json's `layer_types`; "" where all layers see the same.
    """

    name: str
    kind: AttentionKind
    layer: int
    heads: tuple[int, ...]
    stated_heads: int
    original_heads: int
    tensors: Mapping[str, Carrier]
    output: str
    stack: Stack = field(repr=False)
    spec: Attention = field(repr=False)
    owner: str
    removed: bool = False
    shared_tensors: Mapping[str, str] = field(default_factory=dict)
    window: str = ""

    @property
    def has_tensors(self) -> bool:
        """Whether tensors are stored under its own name."""
        return not (self.removed or self.is_shared)

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """Full names of all tensors that it would have of its own."""
        layer = self.name.removesuffix(self.spec.name)
        return tuple(f"{layer}{spec.name}" for spec in self.spec.tensors if not spec.first)

    @property
    def norm_tensors(self) -> tuple[str, ...]:
        """Full names of those of its norms, which are never shared."""
        layer = self.name.removesuffix(self.spec.name)
        return tuple(f"{layer}{name}" for name in own_norms(self.stack, self.spec))

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
    # Of a class that was asked some layers may have no attention.
    layers = [layer for layer in layers if layer.tensors]
    return tuple(sorted(layers, key=lambda layer: (KINDS.index(layer.kind), layer.layer)))


def _layer(
    sizes: Sizes, structure: Structure, stack: Stack, attention: Attention, number: int
) -> AttentionLayer:
    owner = stack.layers.format(layer=number)
    name = f"{owner}.{attention.name}"
    counted = sizes.count(attention.heads)
    if attention.queries is not None:
        sizes.count(f"{attention.queries}/{attention.heads}")
    if counted > MOST_HEADS:
        raise CheckpointError(f"config.json: {attention.heads} is {counted}; no model has so many heads")
    removed, holder = name in structure.removed, structure.shared.get(name, name)
    units = structure.units(holder, "head", counted)
    ids, original = () if removed else units.kept, units.of
    if len(set(ids)) != len(ids) or not all(0 <= head < original for head in ids):
        raise CheckpointError(
            f"config.json names heads {list(ids)} of {name}, which had {original}",
            "config.json and the weights are not of one checkpoint; copy both again.",
        )
    # Layers of one stack may differ.
    attention = replace(attention, tensors=sizes.those_of(stack, structure, number, attention.tensors))
    axes = {
        f"{owner}.{spec.name}": Carrier(spec.heads.axis, tuple(map(sizes.count, spec.heads.blocks)))
        for spec in attention.tensors
        if spec.heads is not None
    }
    kind: AttentionKind = "cross" if attention.kind == "cross" else stack.side
    output = f"{owner}.{attention.output}"
    source = holder.removesuffix(attention.name)
    shared = {
        f"{owner}.{spec.name}": f"{source}{spec.name}"
        for spec in attention.tensors
        if holder != name and not spec.first
    }
    return AttentionLayer(
        name=name,
        kind=kind,
        layer=number,
        heads=ids,
        stated_heads=counted,
        original_heads=original,
        tensors=axes,
        output=output,
        stack=stack,
        spec=attention,
        owner=holder,
        removed=removed,
        shared_tensors=shared,
        window=windows[number] if (windows := layer_windows(sizes, stack)) else "",
    )


def layer_windows(sizes: Sizes, stack: Stack) -> list[str]:
    """Return the attention type of each layer as in `layer_types` of config.json; empty if all are alike."""
    config, family, depth = sizes.config, sizes.family, sizes.depth(stack)
    key = f"{stack.depth.rpartition('.')[0]}.layer_types".removeprefix(".")
    types = value_of(config, key)
    if types is None and family.found is not None:
        types = value_of(family.found.skeleton.effective, key)
    if isinstance(types, list) and len(types) == depth:
        return [str(name) for name in types]
    if family.window_period is not None:
        period = int(config.get("sliding_window_pattern") or family.window_period)
        return ["sliding_attention" if (number + 1) % period else "full_attention" for number in range(depth)]
    if family.window_start is not None and config.get("use_sliding_window"):
        start = sizes.count(family.window_start)
        return ["full_attention" if number < start else "sliding_attention" for number in range(depth)]
    return []


def kind_and_layer(model_type: str, attention: str) -> tuple[str, int]:
    """Kind and layer of an attention by its name; ("heads", 0) where the family does not know it."""
    family = FAMILIES.get(model_type.removeprefix(REDUCED_PREFIX))
    for stack in () if family is None else family.stacks:
        for record in stack.attentions:
            pattern = re.escape(f"{stack.layers}.{record.name}").replace(r"\{layer\}", r"(\d{1,6})")
            if match := re.fullmatch(pattern, attention):
                return ("cross" if record.kind == "cross" else stack.side), int(match[1])
    return "heads", 0
