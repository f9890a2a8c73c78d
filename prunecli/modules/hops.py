"""Layers of one model on several GPUs: each is given what it is given where it is."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from prunecli.model.checkpoint import Checkpoint
from prunecli.model.patchwork import module_name
from prunecli.modules.define import has_module
from prunecli.modules.stock_experts import expert_modules
from prunecli.modules.trees import leaves, map_tree

OF_A_LAYER = re.compile(r"(.*?)\.\d+(?=\.|$)")

Spread = Mapping[str, torch.device]
"""Layer's name, as in the checkpoint -> the GPU that it is on."""


def stacks_of(checkpoint: Checkpoint) -> list[str]:
    """Names of the stacks of layers, in the order in which they run: `model.encoder.layers`."""
    if checkpoint.architecture is not None:
        return [stack.layers.removesuffix(".{layer}") for stack in checkpoint.architecture.stacks]
    mixtures = (layer.name for layer in checkpoint.mixtures if not layer.is_predicting)
    return list(dict.fromkeys(map(stack_of, mixtures)))


def stack_of(name: str) -> str:
    """Of a layer, or of something in it."""
    found = OF_A_LAYER.match(name)
    assert found is not None
    return found[1]


def number_of(name: str) -> int:
    """Of a layer in its stack."""
    return int(name.rpartition(".")[2])


def layer_modules(model: Any, checkpoint: Checkpoint) -> dict[str, nn.Module]:
    """Layer's name, as in the checkpoint -> its module, in the order in which they run."""
    if checkpoint.runs_stock:
        stack = stack_of(next(iter(expert_modules(model))))
        name = stacks_of(checkpoint)[-1]
        return {f"{name}.{number}": module for number, module in model.get_submodule(stack).named_children()}
    names = {layer.name: module_name(model, layer.name) for layer in checkpoint.layout.layers}
    return {name: model.get_submodule(path) for name, path in names.items() if has_module(model, path)}


def places(model: Any, checkpoint: Checkpoint, spread: Spread) -> dict[int, torch.device]:
    """Id of each module of a layer -> the GPU that it is on; a shared one's too."""
    layers = layer_modules(model, checkpoint)
    return {id(part): spread[name] for name, layer in layers.items() for part in layer.modules()}


def connect(model: Any, checkpoint: Checkpoint, spread: Spread, home: torch.device) -> None:
    """Move what is not yet where it belongs there, and have layers be given what they are given where they are.

    Args:
        home: where all but the layers is.
    """
    where = places(model, checkpoint, spread)
    for module in model.modules():
        module._apply(partial(_moved, where.get(id(module), home)), recurse=False)
    stacks: dict[str, list[nn.Module]] = {}
    for name, layer in layer_modules(model, checkpoint).items():
        stacks.setdefault(stack_of(name), []).append(layer)
    for layers in stacks.values():
        hops = Hops()
        layers[0].register_forward_pre_hook(hops.start, with_kwargs=True)
        for layer in layers:
            layer.register_forward_pre_hook(hops.enter, with_kwargs=True)
        layers[-1].register_forward_hook(hops.leave)


def _moved(device: torch.device, tensor: Tensor) -> Tensor:
    return tensor.to(device)


class Hops:
    """Has what the layers of a stack are given go to the GPU of each, once a pass, and what they make come back."""

    def __init__(self) -> None:
        self._home: torch.device | None = None
        self._copies: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = {}

    def start(self, _layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Hook before the first layer."""
        self._copies.clear()
        for tensor in leaves((args, kwargs), Tensor):
            self._home = tensor.device

    def enter(
        self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Hook before each layer."""
        device = next((tensor.device for tensor in chain(layer.parameters(), layer.buffers())), None)
        if device is None:
            return args, kwargs
        bring = partial(self._brought, device)
        return map_tree(args, bring, Tensor), map_tree(kwargs, bring, Tensor)

    def leave(self, _layer: nn.Module, _inputs: tuple[Any, ...], output: Any) -> Any:
        """Hook after the last layer."""
        self._copies.clear()
        home = self._home
        return output if home is None else map_tree(output, partial(_moved, home), Tensor)

    def _brought(self, device: torch.device, tensor: Tensor) -> Tensor:
        """The copy of `tensor` on `device`: of a mask, for one, that all layers are given, the same one."""
        if tensor.device == device:
            return tensor
        key = id(tensor), device
        if key not in self._copies:
            self._copies[key] = tensor, tensor.to(device)  # the first, so that no other gets its id
        return self._copies[key][1]
