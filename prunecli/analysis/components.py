"""The components of a model whose outputs are compared: every self-attention, cross-attention and FFN."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from prunecli.architectures.records import Side
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.layout import Layer

Kind = Literal["self", "cross", "ffn"]
SHORT: dict[Kind, str] = {"self": "sa", "cross": "ca", "ffn": "ffn"}
"""Kind -> what Figure 1 of 2309.01826 calls it."""
Key = tuple[Side, int, Kind]
"""Which component of a model it is, whatever the family calls it."""


@dataclass(frozen=True)
class Component:
    """One component of a model.

    Attributes:
        name: of the attention, as in `Structure`, or `FfnLayer.own_name`.
        side: of which stack.
        layer: its number in the stack.
        kind: self-attention, cross-attention or FFN.
        block: name of its layer.
        output: name of the module whose output is added to the residual stream.
        removed: the checkpoint holds no such component.
    """

    name: str
    side: Side
    layer: int
    kind: Kind
    block: str
    output: str
    removed: bool = False

    @property
    def key(self) -> Key:
        """Key of the corresponding component in another model."""
        return self.side, self.layer, self.kind

    @property
    def label(self) -> str:
        """Label of Figure 1: "0.sa" is the self-attention of the first layer."""
        return f"{self.layer}.{SHORT[self.kind]}"


def components(checkpoint: Checkpoint) -> tuple[Component, ...]:
    """Every component, the encoder's first, in the order in which a token goes through them.

    Raises:
        UnsupportedModelError: the family is not declared.
        CheckpointError: config.json lacks a size, or says of its FFNs what cannot be.
    """
    return tuple(component for layer in checkpoint.layout.layers for component in _of_layer(layer))


def _of_layer(layer: Layer) -> Iterator[Component]:
    block, ffn, stack = layer.name, layer.ffn, layer.ffn.stack
    for attention in layer.attentions:
        spec = attention.spec
        output = f"{block}.{spec.residual or spec.output}"
        yield Component(attention.name, layer.side, layer.number, spec.kind, block, output, attention.removed)
    if not (stack.ffn.name or stack.ffn.tensors):
        return  # of a found family whose FFN no key sizes
    # Where an FFN is no module, its last linear layer makes its output.
    last = "" if stack.ffn.name else f".{stack.ffn.tensors[-1].name.rpartition('.')[0]}"
    inner = stack.ffn.residual or stack.ffn.module
    output = f"{block}.{inner}" if inner else f"{ffn.name}{last}"
    yield Component(ffn.own_name, layer.side, layer.number, "ffn", block, output, ffn.removed)
