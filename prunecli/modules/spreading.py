"""A model over several GPUs, where one does not hold it: its layers are spread over them.

All but the layers of its stacks is on the first GPU, where inputs come in and logits come out: what is tied is there,
once. No layer is split, and those that share tensors lie together. Layers lie in their order, so that hidden states go
to each GPU once a pass; which of them are where is chosen so that the fullest GPU is as little full as can be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from prunecli.model.checkpoint import Checkpoint
from prunecli.model.cost import tensor_bytes
from prunecli.modules.hops import OF_A_LAYER, Spread, number_of, stack_of, stacks_of
from prunecli.modules.stock_model import refused_by_layer

STEPS = 100
"""Shares of the GPUs that are tried, the smallest first."""


@dataclass(frozen=True)
class LayerSizes:
    """What is spread.

    Attributes:
        rest: bytes outside of layers.
        groups: names of layers that lie together, and their bytes, in the order in which they run.
    """

    rest: int
    groups: tuple[tuple[tuple[str, ...], int], ...]

    @property
    def largest(self) -> int:
        """Bytes of the largest group."""
        return max((size for _, size in self.groups), default=0)


def layer_sizes(checkpoint: Checkpoint, target: str, beside: int = 0) -> LayerSizes | None:
    """How the model can be spread, its floating-point weights in the type `target`; None: it cannot.

    Args:
        beside: bytes that a run holds beside the weights, shared out evenly to the layers.
    """
    if checkpoint.family is None or (checkpoint.runs_stock and refused_by_layer(checkpoint) is not None):
        return None
    stacks = stacks_of(checkpoint)
    layers = () if checkpoint.architecture is None else checkpoint.layout.layers
    rest, sizes = 0, dict.fromkeys((layer.name for layer in layers), 0)
    for name, size in tensor_bytes(checkpoint, target).items():
        layer = _layer_of(name, stacks)
        if layer is None:
            rest += size
        else:
            sizes[layer] = sizes.get(layer, 0) + size
    names = sorted(sizes, key=lambda name: (stacks.index(stack_of(name)), number_of(name)))
    together = {name: {name} for name in names}
    pairs = [(part.name, part.owner) for layer in layers for part in layer.attentions]
    pairs += [(layer.ffn.name, layer.ffn.owner) for layer in layers]
    for pair in pairs:  # the second part may be of another layer, whose tensors the first one runs
        both = [own for name in pair if (own := _layer_of(name, stacks)) is not None]
        merged = set().union(*(together[name] for name in both))
        together |= dict.fromkeys(merged, merged)
    groups = dict.fromkeys(tuple(sorted(together[name], key=number_of)) for name in names)
    each = beside // max(len(names), 1)
    return LayerSizes(rest, tuple((group, sum(sizes[name] + each for name in group)) for group in groups))


def spread_layers(sizes: LayerSizes, devices: Sequence[torch.device], room: Sequence[int]) -> Spread | None:
    """Which GPU each layer is on; None: they do not find room.

    Args:
        devices: the first holds all but layers.
        room: bytes of each.
    """
    for step in range(1, STEPS + 1):
        places = _filled(sizes, [size * step // STEPS for size in room])
        if places is not None:
            return {
                name: devices[place]
                for (names, _), place in zip(sizes.groups, places, strict=True)
                for name in names
            }
    return None


def _filled(sizes: LayerSizes, room: Sequence[int]) -> list[int] | None:
    left, device = [room[0] - sizes.rest, *room[1:]], 0
    if left[0] < 0:
        return None
    places = []
    for _, size in sizes.groups:
        while size > left[device]:
            device += 1
            if device == len(left):
                return None
        left[device] -= size
        places.append(device)
    return places


def _layer_of(name: str, stacks: Sequence[str]) -> str | None:
    """The layer of one of the stacks that something of this name is in."""
    found = OF_A_LAYER.match(name)
    return found[0] if found is not None and found[1] in stacks else None
