"""The FFNs of a checkpoint: whose tensors each runs, how wide it is, and where its hidden units lie."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from prunecli.architectures.records import Attention, FeedForward, Side, Stack
from prunecli.model.declared import Sizes
from prunecli.model.structure import Structure


class Owned:
    """Part of a layer that may run the tensors of another one of its kind: an attention or an FFN."""

    name: str
    owner: str

    @property
    def is_shared(self) -> bool:
        """Whether it runs the tensors of another one."""
        return self.owner != self.name

    @property
    def shared_with(self) -> str | None:
        """The other one whose tensors it runs; None: it runs its own."""
        return self.owner if self.is_shared else None


@dataclass(frozen=True)
class FfnLayer(Owned):
    """One FFN of the model, dense or sparse.

    Attributes:
        name: "model.encoder.layers.0.ffn"; that of the layer where the FFN's parts lie in the layer itself.
        own_name: the same, but with ".ffn" after the layer's name there, so that it cannot be taken for the layer.
        side: of which stack.
        layer: its number in the stack.
        width: hidden units that it has (a sparse one: each of its experts); 0 where it is removed.
        owner: name of the FFN whose tensors it runs: its own, but where it is shared.
        removed: whether it is gone, together with its norm.
        is_sparse: whether it is a mixture of experts; its tensors are then those of `layout.SparseLayer`.
        tensors: of a dense FFN, relative to it -> the axis on which the hidden units lie, or None: the output's bias
            has none. Empty where it is removed or sparse.
        blocks: of these, how often all hidden units occur on that axis: 2 where gate and up are fused.
        norm_tensors: full names of those of its own norms, which are never shared.
    """

    name: str
    own_name: str
    side: Side
    layer: int
    width: int
    owner: str
    removed: bool
    is_sparse: bool
    tensors: Mapping[str, int | None]
    blocks: Mapping[str, int]
    norm_tensors: tuple[str, ...]
    stack: Stack = field(repr=False)

    @property
    def kind(self) -> Side:
        """Name of the FFN's kind: its side, as an attention has a kind."""
        return self.side

    @property
    def prefix(self) -> str:
        """Prefix of the names of the tensors that the FFN runs: the owner's name and a dot."""
        return f"{self.owner}."

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """Full names of the tensors that it runs, in the order of `tensors`."""
        return tuple(f"{self.prefix}{suffix}" for suffix in self.tensors)


def resolve_ffns(sizes: Sizes, structure: Structure) -> tuple[FfnLayer, ...]:
    """Every FFN, the encoder's first, by layer.

    Raises:
        CheckpointError: config.json lacks a size, or says what cannot be.
    """
    positions = {
        within(layer, stack.ffn): (stack, number)
        for stack in sizes.family.stacks
        for number, layer in sizes.layers(stack)
    }

    def width(name: str) -> int:
        if name in structure.widths:
            return structure.widths[name]
        return sizes.count(positions[name][0].ffn.width)

    layers = []
    for name, (stack, number) in positions.items():
        owner = structure.shared.get(name, name)
        sparse = is_sparse(sizes, structure, stack, number)
        start = f"{stack.ffn.name}." if stack.ffn.name else ""
        specs = () if sparse else sizes.those_of(stack, structure, number, stack.ffn.tensors, start)
        sparse = not specs
        removed = name in structure.removed and not sparse
        specs = () if removed else specs
        norms = own_norms(stack, stack.ffn)
        layers.append(
            FfnLayer(
                name=name,
                own_name=name if stack.ffn.name else f"{name}.ffn",
                side=stack.side,
                layer=number,
                width=0 if removed else width(owner),
                owner=owner,
                removed=removed,
                is_sparse=sparse,
                tensors={spec.name: spec.hidden for spec in specs},
                blocks={spec.name: spec.hidden_blocks for spec in specs},
                norm_tensors=tuple(f"{stack.layers.format(layer=number)}.{norm}" for norm in norms),
                stack=stack,
            )
        )
    return tuple(layers)


def within(layer: str, ffn: FeedForward) -> str:
    """Return the prefix of the names of an FFN's tensors, without the dot: the layer if the FFN is no module."""
    return f"{layer}.{ffn.name}" if ffn.name else layer


def is_sparse(sizes: Sizes, structure: Structure, stack: Stack, number: int) -> bool:
    """Whether the FFN of this layer, as the model counts them now, is a mixture of experts, by the config.

    Raises:
        CheckpointError: config.json says what cannot be.
    """
    if stack.ffn.sparse_step is None:
        return False
    step = sizes.count(stack.ffn.sparse_step)
    return step > 0 and (structure.original_layer(stack.side, number) + 1) % step == 0


def own_norms(stack: Stack, part: FeedForward | Attention) -> tuple[str, ...]:
    """The tensors of the own norms of an FFN or attention of the stack, relative to the layer."""
    own = tuple(f"{norm}." for norm in part.norms)
    return tuple(spec.name for spec in stack.norms if spec.name.startswith(own))
