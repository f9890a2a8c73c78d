"""FFNs that are shared, removed or of another width, in the place of a stock model's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from prunecli.architectures.records import Stack
from prunecli.model.ffn import FfnLayer
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


def fit_ffn(
    model: nn.Module,
    stack: Stack,
    layer: FfnLayer,
    stock_width: int,
    shapes: Mapping[str, tuple[int, ...]],
    device: torch.device,
) -> None:
    """Make the FFN of a stock model, built on the meta device, the one that `layer` describes.

    A removed FFN and its norms no longer compute: LN(h + FFN(h)) and h + FFN(LN(h)) both become h. A shared one becomes
    the same module as its owner's, whose Parameters there are then once.

    Args:
        model: the stock model; the FFN that this one shares with has its shape already.
        stack: the family's record of the stack.
        layer: what the checkpoint holds.
        stock_width: hidden units that the FFN was built with.
        shapes: name -> shape of the tensors that the checkpoint stores.
        device: where the model will run.
    """
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
    elif layer.width != stock_width:
        for suffix, axis in layer.tensors.items():
            if axis is not None:
                name = f"{layer.prefix}{suffix}"
                path, _, attribute = module_name(model, name).rpartition(".")
                resize(model.get_submodule(path), attribute, shapes[name])


def shared_names(model: nn.Module, layers: tuple[FfnLayer, ...]) -> dict[str, str]:
    """Name in the model of each tensor of a shared FFN -> its owner's, under which it is stored."""
    return {
        module_name(model, f"{layer.name}.{suffix}"): module_name(model, f"{layer.prefix}{suffix}")
        for layer in layers
        if layer.is_shared
        for suffix in layer.tensors
    }


def _parts(stack: Stack) -> tuple[str, ...]:
    """What follows an FFN's name in those of its modules: nothing where it is one; else its linear layers."""
    if stack.ffn.name:
        return ("",)
    return tuple(dict.fromkeys(f".{spec.name.rpartition('.')[0]}" for spec in stack.ffn.tensors))
