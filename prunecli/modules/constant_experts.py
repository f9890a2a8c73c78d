"""Mixtures of stock classes in which constants stand for some experts (2507.00390, MoNE).

The router goes on choosing among all of them. The module of experts is that of a model with as many as are computed,
and adds the constants' part to its output.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from prunecli.architectures.records import Mixture
from prunecli.errors import CheckpointError
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.sparse_layer import CONSTANT, SparseLayer
from prunecli.modules.filling import chunk_for, read_into
from prunecli.modules.stock_experts import expert_modules
from prunecli.modules.uneven import borrow, subclass, with_count


def class_of_constants(stock: Any, mixture: Mixture, layers: Sequence[SparseLayer]) -> Any:
    """A subclass of `stock` with constants in the place of some experts; `fill_constants` gives them their values.

    Args:
        stock: a class of transformers.
        mixture: that it is of.
        layers: of the checkpoint, those that predict further tokens aside.
    """

    def make(self: Any, config: Any) -> None:
        stock.__init__(self, config)
        for count in sorted({len(layer.computed) for layer in layers}):
            other = with_count(config, mixture, count)
            donor = stock(other)
            for layer, path in zip(layers, expert_modules(self), strict=True):
                if len(layer.computed) == count and layer.constants:
                    module = borrow(self, donor, path, config, other)
                    module.__class__ = _class_of_experts(type(module))
                    module.own_layer = layer

    def save_pretrained(_self: Any, *_: Any, **__: Any) -> None:
        raise ValueError(
            "constants stand for experts of this model: copy the directory that it was loaded from."
        )

    ignored = [*(getattr(stock, "_keys_to_ignore_on_load_unexpected", None) or ()), rf"\.{CONSTANT}$"]
    return subclass(
        stock, __init__=make, save_pretrained=save_pretrained, _keys_to_ignore_on_load_unexpected=ignored
    )


def fill_constants(model: Any, checkpoint: Checkpoint) -> None:
    """Read the constants of a model of `class_of_constants`.

    Raises:
        CheckpointError: one cannot be read, or is not as wide as the layer.
    """
    for module in model.modules():
        layer: SparseLayer | None = getattr(module, "own_layer", None)
        if layer is None:
            continue
        names = [layer.expert_tensor(number, CONSTANT) for number in layer.constants]
        weight = module.down_proj
        width = checkpoint.info(names[0]).shape[0]
        if width not in weight.shape:
            raise CheckpointError(f"{checkpoint.path}: {names[0]} is of another width than its layer")
        values = torch.empty(len(names), width, dtype=weight.dtype)
        staging = chunk_for(checkpoint, names)
        for row, name in zip(values, names, strict=True):
            read_into(row, checkpoint, name, staging)
        places = torch.zeros(layer.num_experts, dtype=torch.int64)
        places[list(layer.computed)] = torch.arange(len(layer.computed))
        places[list(layer.constants)] = -1 - torch.arange(len(layer.constants))
        module.register_buffer("constants", values.to(weight.device), persistent=False)
        module.register_buffer("places", places.to(weight.device), persistent=False)


def _class_of_experts(stock: Any) -> Any:
    def forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        places = self.places[top_k_index]
        is_constant = places < 0
        # Of an expert that is computed, and counts nothing.
        given = hidden_states, places.clamp(min=0), top_k_weights.masked_fill(is_constant, 0)
        own: Tensor = stock.forward(self, *given)
        numbers, weights = (-1 - places).clamp(min=0), top_k_weights.masked_fill(~is_constant, 0).float()
        shares = weights.new_zeros(len(weights), len(self.constants)).scatter_add_(1, numbers, weights)
        mixed: Tensor = shares @ self.constants.float()
        return own + mixed.to(own.dtype)

    return subclass(stock, forward=forward)
