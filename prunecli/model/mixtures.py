"""The mixtures of experts that a checkpoint holds, found from the names of its tensors."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from prunecli.architectures.records import Side, Stack
from prunecli.errors import CheckpointError
from prunecli.model.layout import ModelLayout
from prunecli.tensors.reader import TensorReader


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


def find_mixtures(tensors: TensorReader, layout: ModelLayout) -> tuple[SparseLayer, ...]:
    """The sparse layers of a model with these tensors, encoder first, by layer; none where it has no experts.

    Raises:
        CheckpointError: a layer lacks an expert, a tensor or its router, or disagrees with its structure.
    """
    return tuple(
        _sparse_layer(tensors, layout, stack, number, experts)
        for stack in layout.family.stacks
        for number, experts in _experts_by_layer(tensors, stack)
    )


def _experts_by_layer(tensors: TensorReader, stack: Stack) -> Iterator[tuple[int, Mapping[int, list[str]]]]:
    """Number of a layer, ascending -> number of an expert -> its tensors, relative to it."""
    if stack.ffn.expert is None:
        return
    template = re.escape(f"{stack.layers}.{stack.ffn.name}.{stack.ffn.expert}.")
    pattern = re.compile(template.replace(r"\{layer\}", r"(\d+)").replace(r"\{expert\}", r"(\d+)"))
    layers: dict[int, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name in tensors.tensors:
        if match := pattern.match(name):
            layers[int(match[1])][int(match[2])].append(name[match.end() :])
    yield from sorted(layers.items())


def _sparse_layer(
    tensors: TensorReader, layout: ModelLayout, stack: Stack, number: int, experts: Mapping[int, list[str]]
) -> SparseLayer:
    ffn, path, structure = stack.ffn, tensors.path, layout.structure
    name = f"{stack.layers.format(layer=number)}.{ffn.name}"
    count = len(experts)
    absent = sorted(set(range(count)) - set(experts))
    if absent:
        raise CheckpointError(f"{path}: {name} lacks expert {absent[0]} (its last is {max(experts)})")
    suffixes = tuple(spec.name for spec in ffn.tensors)
    for expert, own in experts.items():
        if sorted(own) != sorted(suffixes):
            odd = sorted(set(own) ^ set(suffixes))
            raise CheckpointError(
                f"{path}: expert {expert} of {name} has other tensors than its kind ({odd[0]})"
            )
    routers = tuple(full for spec in ffn.router if (full := f"{name}.{spec.name}") in tensors.tensors)
    if not routers:
        raise CheckpointError(f"{path}: {name} has experts but no router")
    for router in routers:
        if tensors.tensors[router].shape[:1] != (count,):
            shape = list(tensors.tensors[router].shape)
            raise CheckpointError(f"{path}: {router} has the shape {shape}, the layer has {count} experts")
    ids = structure.kept_experts(name, count)
    original = structure.original_experts.get(name, count)
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
