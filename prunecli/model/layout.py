"""What tensors a checkpoint of a declared family has, and which of them make up its sparse layers."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

from prunecli.architectures import Architecture
from prunecli.architectures.records import Attention, Part, Side, Stack, TensorSpec
from prunecli.errors import CheckpointError, UnsupportedModelError
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.declared import count, depth, holds
from prunecli.model.embedding import declared_tables
from prunecli.model.ffn import FfnLayer, declared_ffns, ffn_norms
from prunecli.model.ffn import within as within
from prunecli.model.structure import Structure


@dataclass(frozen=True)
class SparseLayer:
    """A layer whose FFN is a mixture of experts.

    Attributes:
        name: of the FFN, "model.encoder.layers.3.ffn".
        side: of which stack.
        layer: its number in the stack.
        num_experts: how many this checkpoint holds.
        expert_prefix: name of one expert, "{expert}" for its number in this checkpoint.
        expert_tensors: an expert's tensors, relative to it: "fc1.weight".
        router_tensors: full names; their first axis is the expert.
        experts: original ids of the experts, in the order in which they are stored.
        original_experts: how many experts the original layer had.
    """

    name: str
    side: Side
    layer: int
    num_experts: int
    expert_prefix: str
    expert_tensors: tuple[str, ...]
    router_tensors: tuple[str, ...]
    experts: tuple[int, ...]
    original_experts: int

    def expert_tensor(self, expert_index: int, suffix: str) -> str:
        """Full name of a tensor of the expert that is stored as number `expert_index`."""
        return f"{self.expert_prefix.format(expert=expert_index)}.{suffix}"


def sparse_layers(checkpoint: Checkpoint) -> tuple[SparseLayer, ...]:
    """The sparse layers, encoder first, by layer; found from the tensors' names.

    Raises:
        UnsupportedModelError: the family is not declared, or the model has no experts.
        CheckpointError: a layer lacks an expert, a tensor or its router, or disagrees with its structure.
    """
    found = held_sparse_layers(checkpoint)
    if not found:
        raise UnsupportedModelError(
            f"{checkpoint.path}: the model has no experts", "Give a mixture-of-experts checkpoint."
        )
    return found


def held_sparse_layers(checkpoint: Checkpoint) -> tuple[SparseLayer, ...]:
    """As `sparse_layers`, but none where the model has no experts.

    Raises:
        UnsupportedModelError: the family is not declared.
        CheckpointError: as `sparse_layers`.
    """
    family = checkpoint.require_architecture()
    return tuple(layer for stack in family.stacks for layer in _sparse_layers(checkpoint, stack))


def _sparse_layers(checkpoint: Checkpoint, stack: Stack) -> Iterator[SparseLayer]:
    ffn = stack.ffn
    if ffn.expert is None:
        return
    pattern = _pattern(f"{stack.layers}.{ffn.name}.{ffn.expert}.", {"layer": r"(\d+)", "expert": r"(\d+)"})
    layers: dict[int, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name in checkpoint.tensors:
        if match := pattern.match(name):
            layers[int(match[1])][int(match[2])].append(name[match.end() :])
    for number in sorted(layers):
        yield _sparse_layer(checkpoint, stack, number, layers[number])


def _sparse_layer(
    checkpoint: Checkpoint, stack: Stack, number: int, experts: Mapping[int, list[str]]
) -> SparseLayer:
    ffn, path = stack.ffn, checkpoint.path
    name = f"{stack.layers.format(layer=number)}.{ffn.name}"
    count = len(experts)
    absent = sorted(set(range(count)) - set(experts))
    if absent:
        raise CheckpointError(f"{path}: {name} lacks expert {absent[0]} (its last is {max(experts)})")
    suffixes = tuple(spec.name for spec in ffn.tensors)
    for expert, held in experts.items():
        if sorted(held) != sorted(suffixes):
            odd = sorted(set(held) ^ set(suffixes))
            raise CheckpointError(
                f"{path}: expert {expert} of {name} has other tensors than its kind ({odd[0]})"
            )
    routers = tuple(full for spec in ffn.router if (full := f"{name}.{spec.name}") in checkpoint.tensors)
    if not routers:
        raise CheckpointError(f"{path}: {name} has experts but no router")
    for router in routers:
        if checkpoint.tensors[router].shape[:1] != (count,):
            shape = list(checkpoint.tensors[router].shape)
            raise CheckpointError(f"{path}: {router} has the shape {shape}, the layer has {count} experts")
    ids = checkpoint.structure.kept_experts(name, count)
    original = checkpoint.structure.original_experts.get(name, count)
    if (
        len(ids) != count
        or len(set(ids)) != count
        or not all(0 <= expert < max(original, 1) for expert in ids)
    ):
        raise CheckpointError(
            f"{path}: {name} holds {count} experts, config.json names {len(ids)} of {original} as kept",
            "config.json and the weights are not of one checkpoint; copy both again.",
        )
    prefix = f"{name}.{ffn.expert}"
    return SparseLayer(name, stack.side, number, count, prefix, suffixes, routers, ids, original)


def expected_tensors(
    architecture: Architecture, config: Mapping[str, Any], structure: Structure
) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor that a model of this config and structure stores, tied ones once.

    Raises:
        CheckpointError: config.json lacks a size or holds one that is no count.
    """
    return {name: shape for name, (shape, _) in _expected(architecture, config, structure).items()}


def parts(checkpoint: Checkpoint) -> dict[str, Part | Literal["other"]]:
    """What each tensor is counted under; "other" for those that its family does not declare."""
    if checkpoint.architecture is None:
        return dict.fromkeys(checkpoint.tensors, "other")
    patterns = _part_patterns(checkpoint.architecture)
    return {name: _part(patterns, name) for name in checkpoint.tensors}


def part_of(checkpoint: Checkpoint, name: str) -> Part | Literal["other"]:
    """What one tensor is counted under; see `parts`."""
    return _part(_part_patterns(checkpoint.architecture), name) if checkpoint.architecture else "other"


def check_tensors(checkpoint: Checkpoint) -> None:
    """Compare what the checkpoint holds with what its config and structure ask for.

    Raises:
        UnsupportedModelError: the family is not declared.
        CheckpointError: missing, unexpected or misshapen tensors, or a config.json that cannot be.
    """
    family = checkpoint.require_architecture()
    try:
        expected = expected_tensors(family, checkpoint.config, checkpoint.structure)
    except CheckpointError as error:
        raise CheckpointError(f"{checkpoint.path}: {error.message}", error.remedy) from error
    held = checkpoint.tensors
    missing = [name for name in expected if name not in held]
    unexpected = [name for name in held if name not in expected and not is_extra(family, name)]
    misshapen = [
        f"{name} {list(held[name].shape)} instead of {list(shape)}"
        for name, shape in expected.items()
        if name in held and held[name].shape != shape
    ]
    faults = [
        f"{len(names)} {kind} ({', '.join(names[:3])}{', …' if len(names) > 3 else ''})"
        for kind, names in (("missing", missing), ("unexpected", unexpected), ("misshapen", misshapen))
        if names
    ]
    if faults:
        raise CheckpointError(
            f"{checkpoint.path}: tensors do not fit config.json: {'; '.join(faults)}",
            "config.json and the weights are not of one checkpoint; copy both again.",
        )


def is_extra(family: Architecture, name: str) -> bool:
    """Whether it belongs to a part that only some classes of the family have, and that no method changes."""
    return name.startswith(family.extras)


Declared = tuple[tuple[int, ...], Part]


def _expected(family: Architecture, config: Mapping[str, Any], structure: Structure) -> dict[str, Declared]:
    found: dict[str, Declared] = {}

    def add(
        owner: str,
        specs: tuple[TensorSpec, ...],
        *,
        experts: int = 0,
        part: Part | None = None,
        heads: Fraction = Fraction(1),
        width: int | None = None,
        first: bool = True,
    ) -> None:
        for spec in specs:
            if (spec.first and not first) or not holds(family, config, spec.optional):
                continue
            shape = [experts if key == "expert_count" else count(family, config, key) for key in spec.shape]
            if spec.heads is not None:
                if heads == 0:  # a tensor of no head at all is not stored
                    continue
                shape[spec.heads.axis] = int(shape[spec.heads.axis] * heads)
            if spec.hidden is not None and width is not None:
                shape[spec.hidden] = width * spec.hidden_blocks
            found[f"{owner}{spec.name}"] = tuple(shape), part or spec.part

    def add_ffn(stack: Stack, ffn: FfnLayer) -> None:
        if ffn.removed or ffn.is_shared:
            return
        if not ffn.is_sparse:
            add(ffn.prefix, stack.ffn.tensors, width=ffn.width)
            return
        experts = _expert_count(family, config, structure, ffn.name)
        add(ffn.prefix, stack.ffn.router, experts=experts)
        for expert in range(experts):
            prefix = f"{ffn.prefix}{str(stack.ffn.expert).format(expert=expert)}."
            add(prefix, stack.ffn.tensors, part="experts")

    tables = declared_tables(family, config, structure)
    add("", family.tensors)
    if tables is not None:
        for name in tables.stock:
            del found[name]
        found |= {name: (shape, "embeddings") for name, shape in tables.tensors.items()}
    ffns = {ffn.name: ffn for ffn in declared_ffns(family, config, structure)}
    for stack in family.stacks:
        for number in range(depth(family, config, stack.depth)):
            layer = stack.layers.format(layer=number)
            for attention in stack.attentions:
                share = _head_share(family, config, structure, attention, f"{layer}.{attention.name}")
                add(f"{layer}.", attention.tensors, heads=share, first=number == 0)
            ffn = ffns[within(layer, stack.ffn)]
            gone = ffn_norms(stack) if ffn.removed else ()
            add(f"{layer}.", tuple(spec for spec in stack.norms if spec.name not in gone))
            add_ffn(stack, ffn)
    return found


def _head_share(
    family: Architecture, config: Mapping[str, Any], structure: Structure, attention: Attention, name: str
) -> Fraction:
    """Heads that the attention holds, as a part of those that config.json counts."""
    counted = count(family, config, attention.heads)
    return Fraction(len(structure.heads.get(name, range(counted))), max(counted, 1))


def _expert_count(family: Architecture, config: Mapping[str, Any], structure: Structure, layer: str) -> int:
    if layer in structure.experts:
        return len(structure.experts[layer])
    return structure.original_experts.get(layer) or count(family, config, family.expert_count[0])


Patterns = list[tuple["re.Pattern[str]", Part]]


def _part_patterns(family: Architecture) -> Patterns:
    """Full-name patterns of every declared tensor."""
    any_number = {"layer": r"\d+", "expert": r"\d+"}
    found: Patterns = [(_pattern(spec.name, any_number, whole=True), spec.part) for spec in family.tensors]
    # An alias that is kept because its values differ counts as what it should equal.
    found += [
        (_pattern(alias, any_number, whole=True), spec.part)
        for alias, name in family.tied.items()
        for spec in family.tensors
        if spec.name == name
    ]
    if (embedding := family.embedding) is not None:
        owned = {f"{embedding.input}.": True, f"{embedding.output}.project.weight": False}
        found += [(_pattern(name, {}, whole=not begins), "embeddings") for name, begins in owned.items()]
    for stack in family.stacks:
        ffn = stack.ffn
        groups: list[tuple[str, tuple[TensorSpec, ...], Part | None]] = [
            (stack.layers, tuple(spec for attention in stack.attentions for spec in attention.tensors), None),
            (stack.layers, stack.norms, None),
            (within(stack.layers, ffn), (*ffn.router, *ffn.tensors), None),
        ]
        if ffn.expert is not None:
            groups.append((f"{stack.layers}.{ffn.name}.{ffn.expert}", ffn.tensors, "experts"))
        for owner, specs, part in groups:
            found += [
                (_pattern(f"{owner}.{spec.name}", any_number, whole=True), part or spec.part)
                for spec in specs
            ]
    return found


def _part(patterns: Patterns, name: str) -> Part | Literal["other"]:
    return next((part for pattern, part in patterns if pattern.match(name)), "other")


def _pattern(template: str, numbers: Mapping[str, str], *, whole: bool = False) -> re.Pattern[str]:
    """A regular expression for `template`, its "{layer}" and "{expert}" replaced by those of `numbers`."""
    pieces = re.split(r"\{(\w+)\}", template)
    text = "".join(numbers[piece] if index % 2 else re.escape(piece) for index, piece in enumerate(pieces))
    return re.compile(text + (r"\Z" if whole else ""))
