"""The mixtures of experts that a checkpoint holds, found from the names of its tensors."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from prunecli.architectures.records import Mixture, Side
from prunecli.errors import CheckpointError
from prunecli.model.axes import axis_name
from prunecli.model.declared import LARGEST, REMEDY, Sizes, all_items
from prunecli.model.sparse_layer import CONSTANT, Groups, SparseLayer
from prunecli.model.structure import Structure
from prunecli.tensors.dtypes import is_float
from prunecli.tensors.reader import TensorInfo, TensorReader

OF_AN_EXPERT = re.compile(r"(?:^|\.)experts?\.")
"""What is found in the names of tensors of experts."""
_OF_A_WIDTH = re.compile(r"norm|proj|dense|linear")
"""What is found in the names of norms and projections, whose axes are widths of the model."""
_ROUTING = re.compile(r"expert|rout|gate\b|score|balanc|correction")
"""What is found in the names of tensors that a router has for each expert."""
_WIDTH_KEYS = ("_size", "_dim", "_rank", "d_model", "n_embd")
"""Endings of the keys of config.json that state a width."""
UNDECLARED = "prunecli would damage what it does not know; it changes no model of this kind."

Info = TypeVar("Info")
"""What is known of a tensor."""


def find_mixtures(
    path: Path, tensors: Mapping[str, TensorInfo], sizes: Sizes, structure: Structure
) -> tuple[SparseLayer, ...]:
    """The sparse layers of a model with these tensors, encoder first, by layer; none where it has no experts.

    Layers that predict further tokens come last. `path` is that of the checkpoint, for messages.

    Raises:
        CheckpointError: a layer lacks an expert, a tensor or its router, disagrees with its structure or config.json,
            or holds a tensor of all experts that the family does not declare.
    """
    mixture = sizes.family.mixture
    if mixture is None:
        return ()
    blocks, others = blocks_of(tensors, mixture)
    found = [
        layer
        for (name, side, number), members in blocks.items()
        if (layer := _sparse_layer(path, sizes, structure, name, (side, number), members)) is not None
    ]
    for name in others:
        if OF_AN_EXPERT.search(name):
            raise CheckpointError(
                f"{path}: {name} is of an expert, in a place that a model of type "
                f"{sizes.family.model_type} has none",
                UNDECLARED,
            )
    found.sort(key=lambda layer: (layer.is_predicting, layer.side == "decoder", layer.layer))
    if sizes.family.stock_fault is None:
        for key, count in stated_counts(sizes, mixture).items():
            for layer in found:
                if layer.num_experts != count and axis_name(layer.name, "expert") not in structure.axes:
                    raise CheckpointError(
                        f"{path}: {layer.name} holds {layer.num_experts} experts, config.json says {count} "
                        f'("{key}")',
                        REMEDY,
                    )
    return tuple(found)


def stated_counts(sizes: Sizes, mixture: Mixture) -> dict[str, int]:
    """Config key -> experts a layer, of all that config.json states.

    Raises:
        CheckpointError: they disagree, or one is no count.
    """
    counts = {key: sizes.even(key) for key in mixture.counts if sizes.states(key)}
    if len(set(counts.values())) > 1:
        said = ", ".join(f'"{key}" is {count}' for key, count in counts.items())
        raise CheckpointError(
            f"config.json: {said}; both count the experts of a layer",
            "transformers reads one of them, other programs the other; correct the one that is wrong.",
        )
    return counts


def experts_per_token(sizes: Sizes, mixture: Mixture) -> int:
    """How many experts the router picks for a token.

    Raises:
        CheckpointError: config.json does not say it, or says what is no count.
    """
    if isinstance(mixture.top_k, int):
        return mixture.top_k
    stated = [sizes.even(key) for key in mixture.top_k if sizes.states(key)]
    if stated:
        return stated[0]
    if mixture.default_top_k is None:
        raise CheckpointError(f'config.json lacks "{mixture.top_k[0]}", the experts that a token is given to')
    return mixture.default_top_k


def predicting_tensors(tensors: TensorReader, sizes: Sizes) -> tuple[str, ...]:
    """All tensors of the layers that predict further tokens, dense ones too."""
    mixture = sizes.family.mixture
    if mixture is None or sizes.family.stacks:
        return ()
    columns = tuple({block.partition("{layer}")[0] for block in mixture.blocks})
    numbered = re.compile("(?:" + "|".join(map(re.escape, columns)) + r")(\d+)\.")
    depth = _depth(sizes, mixture)
    return tuple(
        name
        for name in tensors.tensors
        if name.startswith(mixture.predicting)
        or ((match := numbered.match(name)) is not None and int(match[1]) >= depth)
    )


def _depth(sizes: Sizes, mixture: Mixture) -> int:
    """Layers of a language model, behind which lie those that predict further tokens; of a pair, more than any has."""
    is_pair = len({"encoder" in block.split(".") for block in mixture.blocks}) > 1
    return LARGEST if is_pair or not sizes.states(mixture.depth) else sizes.even(mixture.depth)


def blocks_of(
    tensors: Mapping[str, Info], mixture: Mixture
) -> tuple[dict[tuple[str, Side, int], dict[str, Info]], list[str]]:
    """(Name, side, number) of each block -> its tensors, relative to it; and the names of all other tensors."""
    patterns = [
        (
            re.compile(re.escape(f"{block}.").replace(r"\{layer\}", r"(\d+)")),
            block,
            "encoder" if "encoder" in block.split(".") else "decoder",
        )
        for block in mixture.blocks
    ]
    found: dict[tuple[str, Side, int], dict[str, Info]] = {}
    begun: dict[str, dict[str, Info]] = {}  # of a block, by what its names begin with
    others: list[str] = []
    for name, info in tensors.items():
        for pattern, block, side in patterns:
            if match := pattern.match(name):
                if (own := begun.get(match[0])) is None:
                    number = int(match[1])
                    key: tuple[str, Side, int] = (block.format(layer=number), side, number)  # type: ignore[assignment]
                    own = begun[match[0]] = found.setdefault(key, {})
                own[name[match.end() :]] = info
                break
        else:
            others.append(name)
    return found, others


def _sparse_layer(
    path: Path,
    sizes: Sizes,
    structure: Structure,
    name: str,
    position: tuple[Side, int],
    members: Mapping[str, TensorInfo],
) -> SparseLayer | None:
    """The mixture of a block; None where it is a dense FFN."""
    mixture, where = sizes.family.mixture, f"{path}: {name}"
    assert mixture is not None
    experts, rest = experts_of(mixture, members)
    stacked = [suffix for suffix in rest if suffix.startswith(mixture.stacked)]
    routers = [suffix for suffix in mixture.router if suffix in rest]
    if not experts and not stacked:
        if routers:
            raise CheckpointError(f"{where} has a router ({routers[0]}) but no experts")
        return None
    if not routers:
        raise CheckpointError(f"{where} has experts but no router")
    # Matrices may lie one below the other (DBRX) in place of behind one another.
    is_flat = bool(stacked) and all(len(rest[suffix].shape) == 2 for suffix in stacked)
    count = len(experts) or next(iter(rest[(routers if is_flat else stacked)[0]].shape), 0)
    constants = tuple(sorted(number for number, own in experts.items() if {*own} == {CONSTANT}))
    suffixes = _suffixes(path, name, experts, constants)
    declared = [spec.name for stack in sizes.family.stacks for spec in stack.ffn.tensors]
    if set(suffixes) <= set(declared):
        suffixes = tuple(sorted(suffixes, key=declared.index))
    cut = {
        **dict.fromkeys(routers, 0),
        **{suffix: axis for suffix, axis in mixture.vectors.items() if suffix in rest},
        **dict.fromkeys(stacked, 0),
    }
    for suffix, axis in cut.items():
        shape = rest[suffix].shape
        held = shape[axis] if len(shape) > axis else 0
        if held != count and not (is_flat and suffix in stacked and held and held % max(count, 1) == 0):
            raise CheckpointError(
                f"{path}: {name}.{suffix} has the shape {list(shape)}, the layer has {count} experts"
            )
    for suffix in routers:
        if not is_float(rest[suffix].dtype):
            raise CheckpointError(f"{where}.{suffix} is quantised ({rest[suffix].dtype})", UNDECLARED)
    for suffix, info in rest.items():
        is_known = suffix in cut or suffix.startswith(mixture.shared)
        if not is_known and count in info.shape and not _is_of_a_width(sizes, structure, suffix, count):
            raise CheckpointError(
                f"{where}.{suffix} {list(info.shape)} has an entry for each of {count} experts, or so it seems: "
                f"no part of a model of type {sizes.family.model_type}",
                UNDECLARED,
            )
    units = structure.units(name, "expert", count)
    ids, original = units.kept, units.of
    if (
        len(ids) != count
        or len(set(ids)) != count
        or not all(0 <= expert < max(original, 1) for expert in ids)
    ):
        raise CheckpointError(
            f"{where} holds {count} experts, config.json names {len(ids)} of {original} as kept", REMEDY
        )
    side, number = position
    return SparseLayer(
        name=name,
        side=side,
        layer=number,
        num_experts=count,
        expert_prefix=f"{name}.{mixture.expert}" if experts else "",
        expert_tensors=suffixes,
        router_tensors=tuple(f"{name}.{suffix}" for suffix in routers),
        experts=ids,
        original_experts=original,
        top_k=experts_per_token(sizes, mixture),
        cut={f"{name}.{suffix}": axis for suffix, axis in cut.items()},
        stacked_tensors=tuple(f"{name}.{suffix}" for suffix in stacked),
        groups=_groups(sizes, mixture, count),
        is_predicting=not sizes.family.stacks
        and (name.startswith(mixture.predicting) or number >= _depth(sizes, mixture)),
        constants=constants,
    )


def _is_of_a_width(sizes: Sizes, structure: Structure, suffix: str, count: int) -> bool:
    """Whether an axis of `count` entries is a width of the model, by the tensor's name, not one entry per expert."""
    widths = {value for key, value in all_items(sizes.config) if key.endswith(_WIDTH_KEYS)}
    widths.update(structure.widths.values())
    return count in widths and bool(_OF_A_WIDTH.search(suffix)) and not _ROUTING.search(suffix)


def experts_of(
    mixture: Mixture, members: Mapping[str, Info]
) -> tuple[dict[int, dict[str, Info]], dict[str, Info]]:
    """Number of an expert -> its tensors, relative to it; and the block's other tensors."""
    if mixture.expert is None:
        return {}, dict(members)
    pattern = re.compile(re.escape(f"{mixture.expert}.").replace(r"\{expert\}", r"(\d+)"))
    experts: dict[int, dict[str, Info]] = {}
    rest = {}
    for suffix, info in members.items():
        if match := pattern.match(suffix):
            experts.setdefault(int(match[1]), {})[suffix[match.end() :]] = info
        else:
            rest[suffix] = info
    return experts, rest


def _suffixes(
    path: Path, name: str, experts: Mapping[int, Mapping[str, TensorInfo]], constants: tuple[int, ...]
) -> tuple[str, ...]:
    """The tensors that every expert has, relative to it, but for those that are constants."""
    absent = sorted(set(range(len(experts))) - set(experts))
    if absent:
        raise CheckpointError(f"{path}: {name} lacks expert {absent[0]} (its last is {max(experts)})")
    if not experts:
        return ()
    computed = {number: own for number, own in sorted(experts.items()) if number not in constants}
    if not computed:
        raise CheckpointError(f"{path}: {name} holds constants in the place of all of its experts")
    reference, first = next(iter(computed.items()))
    for number, own in computed.items():
        if own.keys() != first.keys():
            odd = sorted(own.keys() ^ first.keys())
            raise CheckpointError(
                f"{path}: expert {number} of {name} has other tensors than its kind ({odd[0]})"
            )
        for suffix, info in own.items():
            if info.shape != first[suffix].shape:
                raise CheckpointError(
                    f"{path}: {suffix} of expert {number} of {name} has the shape {list(info.shape)}, that of expert "
                    f"{reference} {list(first[suffix].shape)}"
                )
    return tuple(first)


def _groups(sizes: Sizes, mixture: Mixture, count: int) -> Groups:
    declared = mixture.groups
    if declared is None or not sizes.states(declared.count) or not sizes.holds(declared.condition):
        return Groups()
    groups = sizes.even(declared.count)
    if not groups or count % groups:
        raise CheckpointError(f"config.json: {groups} groups of {count} experts cannot be of one size")
    chosen = sizes.even(declared.chosen) if sizes.states(declared.chosen) else 1
    if chosen > groups:
        raise CheckpointError(
            f"config.json: {declared.chosen} is {chosen}, there are {groups} groups of experts"
        )
    return Groups(groups, chosen, declared.least) if groups > 1 else Groups()
