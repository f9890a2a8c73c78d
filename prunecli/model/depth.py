"""Layers that go: what config.json and the structure then say, and what the tensors of those that stay are called."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from prunecli.architectures import Architecture
from prunecli.architectures.records import Side
from prunecli.errors import CheckpointError
from prunecli.model.axes import Rename, axis_name, module_of, renaming
from prunecli.model.declared import REMEDY, Sizes
from prunecli.model.structure import STATISTICS_OF, KeptUnits, Structure

Kept = Mapping[Side, Sequence[int]]
"""Side -> numbers of the layers that stay, as the model counts them now, ascending; one that is left out keeps all."""

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
    for side, units in structure.of_kind("layer").items():
        ids, depth = list(units.kept), depths.get(side, 0)
        if len(ids) != depth or ids != [number for number in range(units.of) if number in ids]:
            raise CheckpointError(
                f"config.json names layers {ids} of the {side} as kept, of {units.of}; it counts {depth}",
                REMEDY,
            )


def renaming_of(family: Architecture, kept: Kept) -> Rename:
    """How tensors are called in the model with only these layers."""
    prefixes = {stack.side: module_of(stack.layers) for stack in family.stacks}
    return renaming({prefixes[side]: numbers for side, numbers in kept.items() if side in prefixes})


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
        if step["command"] == PRUNE_LAYERS and "removed" in step["arguments"]:
            kept: Kept = {  # with numbers of some that never were
                side: [n for n in range(structure.units(side, "layer", 0).of) if n not in numbers]
                for side, numbers in step["arguments"]["removed"].items()
            }
            renames.append(renaming_of(family, kept))

    def rename(name: str) -> str | None:
        found: str | None = name
        for one in renames:
            found = None if found is None else one(found)
        return found

    return rename if renames else None


def heirs(structure: Structure, rename: Rename) -> dict[str, str]:
    """Shared FFN or attention that goes -> the first that runs its tensors and stays: it holds them from now on."""
    found: dict[str, str] = {}
    for name, owner in structure.shared.items():
        if rename(owner) is None and rename(name) is not None:
            found.setdefault(owner, name)
    return found


def keeping_layers(sizes: Sizes, structure: Structure, kept: Kept) -> Structure:
    """`structure` of the model with only these layers: their numbers, and all that it says of them."""
    rename = renaming_of(sizes.family, kept)
    found = heirs(structure, rename)
    moved = found | {axis_name(owner, "head"): axis_name(heir, "head") for owner, heir in found.items()}
    renamed = structure.renamed(lambda name: rename(moved.get(name, name)))
    axes = dict(renamed.axes)
    for stack in sizes.family.stacks:
        depth = sizes.depth(stack)
        numbers = kept.get(stack.side, range(depth))
        if len(numbers) < depth:
            before = structure.units(stack.side, "layer", depth)
            left = tuple(before.kept[number] for number in numbers)
            axes[axis_name(stack.side, "layer")] = KeptUnits(left, before.of)
    return replace(renamed, axes=axes)


def layers_left(sizes: Sizes, before: Structure, after: Structure) -> dict[Side, list[int]]:
    """Side -> places of the layers of `after` among those of `before`, which `sizes` counts."""
    kept = {}
    for stack in sizes.family.stacks:
        held = before.units(stack.side, "layer", sizes.depth(stack))
        left = after.units(stack.side, "layer", held.of)
        kept[stack.side] = [held.kept.index(number) for number in left.kept]
    return kept


def config_of_layers(sizes: Sizes, before: Structure, after: Structure) -> Mapping[str, Any]:
    """config.json of the model that has the layers of `after`, of those that it has by `before`."""
    kept = layers_left(sizes, before, after)
    if all(len(kept[stack.side]) == sizes.depth(stack) for stack in sizes.family.stacks):
        return sizes.config
    if (found := sizes.family.found) is not None:
        layers: Mapping[str, Any] = found.with_layers(
            sizes.config, {stack.depth: kept[stack.side] for stack in sizes.family.stacks}
        )
        return layers
    config = dict(sizes.config)
    for stack in sizes.family.stacks:
        config[stack.depth] = len(kept[stack.side])
    if DEPTH_ALIAS in config:
        config[DEPTH_ALIAS] = len(kept[sizes.family.stacks[0].side])
    return config
