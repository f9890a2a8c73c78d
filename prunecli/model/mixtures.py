"""The mixtures of experts that a checkpoint holds, found from the names of its tensors."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prunecli.architectures.records import Side, Stack
from prunecli.errors import CheckpointError

if TYPE_CHECKING:
    from prunecli.model.checkpoint import Checkpoint


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


def find_mixtures(checkpoint: Checkpoint) -> tuple[SparseLayer, ...]:
    """The sparse layers, encoder first, by layer; none where the model has no experts.

    Raises:
        UnsupportedModelError: the family is not declared.
        CheckpointError: a layer lacks an expert, a tensor or its router, or disagrees with its structure.
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


def _pattern(template: str, numbers: Mapping[str, str], *, whole: bool = False) -> re.Pattern[str]:
    """A regular expression for `template`, its "{layer}" and "{expert}" replaced by those of `numbers`."""
    pieces = re.split(r"\{(\w+)\}", template)
    text = "".join(numbers[piece] if index % 2 else re.escape(piece) for index, piece in enumerate(pieces))
    return re.compile(text + (r"\Z" if whole else ""))
