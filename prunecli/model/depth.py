"""Layers that go: what config.json and the structure then say, and what the tensors of those that stay are called."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from prunecli.architectures import Architecture
from prunecli.architectures.records import Side
from prunecli.errors import CheckpointError
from prunecli.model.attention import AttentionLayer, layer_windows, resolve_attentions
from prunecli.model.changes import AttentionChange, FfnChange
from prunecli.model.declared import Sizes
from prunecli.model.ffn import FfnLayer, is_sparse, resolve_ffns
from prunecli.model.structure import STATISTICS_OF, Structure

Kept = Mapping[Side, Sequence[int]]
"""Side -> numbers of the layers that stay, as the model counts them now, ascending; one that is left out keeps all."""

Rename = Callable[[str], str | None]
"""Name of a layer, or of what is in one -> its name where only some layers stay; None: it goes with its layer."""

Value = TypeVar("Value")

PRUNE_LAYERS = "prune-layers"
"""The command whose steps of history name the layers that went, as they were numbered then."""

DEPTH_ALIAS = "num_hidden_layers"
"""What some config.json hold beside the family's own key; transformers takes it for the depth of the first stack."""


def check_layers(sizes: Sizes, structure: Structure) -> None:
    """Refuse a structure whose layers are not those of config.json.

    Raises:
        CheckpointError: it names other layers than there can be.
    """
    depths: dict[str, int] = {stack.side: sizes.depth(stack) for stack in sizes.family.stacks}
    for side, ids in structure.layers.items():
        original, depth = structure.original_layers.get(side, 0), depths.get(side, 0)
        if len(ids) != depth or list(ids) != [number for number in range(original) if number in ids]:
            raise CheckpointError(
                f"config.json names layers {list(ids)} of the {side} as kept, of {original}; it counts {depth}",
                "config.json and the weights are not of one checkpoint; copy both again.",
            )


def renaming(family: Architecture, kept: Kept) -> Rename:
    """How tensors are called in the model with only these layers."""
    stacks = [
        (
            re.compile(re.escape(stack.layers).replace(r"\{layer\}", r"(\d+)") + r"(?=\.|$)"),
            stack.layers,
            numbers,
        )
        for stack in family.stacks
        if (numbers := kept.get(stack.side)) is not None
    ]

    def rename(name: str) -> str | None:
        for pattern, layers, numbers in stacks:
            if match := pattern.match(name):
                number = int(match[1])
                if number not in numbers:
                    return None
                return layers.format(layer=numbers.index(number)) + name[match.end() :]
        return name

    return rename


def renaming_since(family: Architecture, structure: Structure, fingerprint: str | None) -> Rename | None:
    """From names in the checkpoint of this fingerprint to those in the one of `structure`, which was made from it.

    By the steps of history; None where none of these removed layers.
    """
    known = [
        (step.get("source", {}).get("fingerprint"), step.get(STATISTICS_OF)) for step in structure.history
    ]
    first = next((index for index, of_step in enumerate(known) if fingerprint in of_step), len(known))
    later = structure.history[first:] if fingerprint is not None else ()
    renames = []
    for step in later:
        if step.get("command") == PRUNE_LAYERS and "removed" in step.get("arguments", {}):
            kept: Kept = {  # with numbers of some that never were
                side: [n for n in range(structure.original_layers.get(side, 0)) if n not in numbers]
                for side, numbers in step["arguments"]["removed"].items()
            }
            renames.append(renaming(family, kept))

    def rename(name: str) -> str | None:
        found: str | None = name
        for one in renames:
            found = None if found is None else one(found)
        return found

    return rename if renames else None


def heirs(parts: Sequence[FfnLayer] | Sequence[AttentionLayer], rename: Rename) -> dict[str, str]:
    """Owner of an FFN, or attention, that a layer which stays runs -> what holds the tensors from now on.

    That is the owner itself where its layer stays, else the first that shared it.
    """
    found: dict[str, str] = {}
    for layer in parts:
        if not layer.removed and rename(layer.name) is not None:
            found.setdefault(layer.owner, layer.name if rename(layer.owner) is None else layer.owner)
    return found


def keeping_layers(sizes: Sizes, structure: Structure, kept: Kept) -> Structure:
    """`structure` of the model with only these layers: their numbers, and all that it says of them."""
    rename = renaming(sizes.family, kept)
    holders = heirs(resolve_ffns(sizes, structure), rename)
    attention_holders = heirs(resolve_attentions(sizes, structure), rename)
    layers, original = dict(structure.layers), dict(structure.original_layers)
    for stack in sizes.family.stacks:
        depth = sizes.depth(stack)
        numbers = kept.get(stack.side, range(depth))
        if len(numbers) < depth:
            before = layers.get(stack.side, tuple(range(depth)))
            layers[stack.side] = tuple(before[number] for number in numbers)
            original.setdefault(stack.side, depth)

    def own(values: Mapping[str, Value]) -> dict[str, Value]:
        return {new: value for name, value in values.items() if (new := rename(name)) is not None}

    def change(name: str, stated: FfnChange) -> FfnChange:
        if stated.shared_with is None:
            return stated
        holder = holders[stated.shared_with]
        if holder == name:
            return structure.ffn.get(stated.shared_with, FfnChange())
        return FfnChange(shared_with=rename(holder))

    def attention_change(stated: AttentionChange) -> AttentionChange:
        if stated.shared_with is None:
            return stated
        return AttentionChange(shared_with=rename(attention_holders[stated.shared_with]))

    heads = dict(structure.heads)
    for owner, holder in attention_holders.items():
        if owner in heads:
            heads[holder] = heads[owner]
    changes = own({name: change(name, stated) for name, stated in structure.ffn.items() if rename(name)})
    return replace(
        structure,
        layers=layers,
        original_layers=original,
        experts=own(structure.experts),
        original_experts=own(structure.original_experts),
        heads=own(heads),
        original_heads=own(structure.original_heads),
        attention=own(
            {
                name: attention_change(stated)
                for name, stated in structure.attention.items()
                if rename(name) and name not in attention_holders.values()
            }
        ),
        ffn={name: stated for name, stated in changes.items() if stated != FfnChange()},
    )


def config_of_layers(sizes: Sizes, before: Structure, after: Structure) -> Mapping[str, Any]:
    """config.json of the model that has the layers of `after`, of those that it has by `before`.

    Every list with an entry a layer keeps those of its layers; a rule by which windows, or rotary positions, follow
    from a layer's number becomes such a list, as does one by which FFNs are dense.
    """
    kept = {}
    for stack in sizes.family.stacks:  # where the layers of `after` lie among those of `before`
        held = before.layers.get(stack.side, tuple(range(sizes.depth(stack))))
        kept[stack.side] = [held.index(number) for number in after.layers.get(stack.side, held)]
    if all(len(kept[stack.side]) == sizes.depth(stack) for stack in sizes.family.stacks):
        return sizes.config
    config = dict(sizes.config)
    for stack in sizes.family.stacks:
        config[stack.depth] = len(kept[stack.side])
    first, family = sizes.family.stacks[0], sizes.family
    numbers, depth = kept[first.side], sizes.depth(first)
    if DEPTH_ALIAS in config:
        config[DEPTH_ALIAS] = len(numbers)
    if first.ffn.dense_layers is not None and first.ffn.sparse_step is not None:
        dense = [new for new, number in enumerate(numbers) if not is_sparse(sizes, before, first, number)]
        config |= {first.ffn.dense_layers: dense, first.ffn.sparse_step: 1}
    types = config.get("layer_types")
    if types is None and family.window_period is not None:
        types = layer_windows(sizes, first)
    rotary = config.get("no_rope_layers")
    if rotary is None and family.no_rope_interval is not None:
        interval = sizes.count(family.no_rope_interval)
        rotary = [int((number + 1) % interval != 0) for number in range(depth)]
    for key, values in (("layer_types", types), ("no_rope_layers", rotary)):
        if isinstance(values, list) and len(values) == depth:
            config[key] = [values[number] for number in numbers]
    if family.window_start is not None and sizes.count(family.window_start) < depth:
        start = sizes.count(family.window_start)
        config[family.window_start] = sum(number < start for number in numbers)
    return config
