"""FFNs that are shared, removed or of another width, in the place of a stock model's."""

from __future__ import annotations

import torch
from torch import nn

from prunecli.architectures.records import Stack
from prunecli.model.ffn import FfnLayer
from prunecli.model.layout import ModelLayout
from prunecli.modules.absent import Nothing
from prunecli.modules.attention import module_name, resize


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
