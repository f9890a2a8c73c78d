"""FFNs that are shared, removed or of another width, in the place of a stock model's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from prunecli.architectures.records import Stack
from prunecli.model.ffn import FfnLayer
from prunecli.model.layout import ModelLayout
from prunecli.modules.attention import module_name, resize


class Nothing(nn.Module):
    """In the place of an FFN that is removed: a zero without axes, so that the residual connection adds nothing.

    It is a buffer, so that a forward pass makes no tensor; its type never raises that of what it is added to.
    """

    zero: Tensor

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.register_buffer("zero", torch.zeros((), device=device), persistent=False)

    def forward(self, *_: Any, **__: Any) -> Tensor:
        """Whatever the input: 0 `[]`."""
        return self.zero


def fit_ffn(model: nn.Module, layer: FfnLayer, layout: ModelLayout, device: torch.device) -> None:
    """Make the FFN of a stock model, built on the meta device, the one that `layer` describes.

    A removed FFN and its norms no longer compute: LN(h + FFN(h)) and h + FFN(LN(h)) both become h. A shared one becomes
    the same module as its owner's, whose Parameters there are then once.

    Args:
        model: the stock model; the FFN that this one shares with has its shape already.
        layer: one of the layout's dense FFNs.
        layout: of the checkpoint.
        device: where the model will run.
    """
    stack = layer.stack
    if layer.removed:
        for norm in stack.ffn.norms:
            name = f"{stack.layers.format(layer=layer.layer)}.{norm}"
            model.set_submodule(module_name(model, name), nn.Identity())
        for part in _parts(stack):
            model.set_submodule(module_name(model, f"{layer.name}{part}"), Nothing(device))
    elif layer.is_shared:
        for part in _parts(stack):
            owner = model.get_submodule(module_name(model, f"{layer.owner}{part}"))
            model.set_submodule(module_name(model, f"{layer.name}{part}"), owner)
    elif layer.width != layout.sizes.count(stack.ffn.width):
        for suffix, axis in layer.tensors.items():
            if axis is not None:
                name = f"{layer.prefix}{suffix}"
                path, _, attribute = module_name(model, name).rpartition(".")
                resize(model.get_submodule(path), attribute, layout.shapes[name])


def _parts(stack: Stack) -> tuple[str, ...]:
    """What follows an FFN's name in those of its modules: nothing where it is one; else its linear layers."""
    if stack.ffn.name:
        return ("",)
    return tuple(dict.fromkeys(f".{spec.name.rpartition('.')[0]}" for spec in stack.ffn.tensors))
