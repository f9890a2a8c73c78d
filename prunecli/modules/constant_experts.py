"""Mixtures of stock classes whose layers differ: in their numbers of experts, or in those that constants stand for.

A stock class knows one number of experts for all layers. A model of the stock class is made for each number, without
values, and each layer is taken from the model of its own number: so transformers' classes make all modules, and their
own rules fill and store them.

Where constants stand for some experts (2507.00390, MoNE), the router goes on choosing among all experts. The module of
experts is that of a model with as many as are computed, and adds the constants' part to its output.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from prunecli.architectures.records import Mixture
from prunecli.errors import CheckpointError
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.sparse_layer import CONSTANT, SparseLayer
from prunecli.modules.filling import chunk_for, read_into
from prunecli.modules.stock_experts import expert_modules
from prunecli.private import UNEXPECTED


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

    ignored = [*(getattr(stock, UNEXPECTED, None) or ()), rf"\.{CONSTANT}$"]
    return subclass(stock, __init__=make, save_pretrained=save_pretrained, **{UNEXPECTED: ignored})


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


def class_of_counts(stock: Any, mixture: Mixture, counts_of: Callable[[Any], Mapping[str, int]]) -> Any:
    """A subclass of `stock` whose layers have numbers of experts of their own.

    Args:
        stock: a class of transformers.
        mixture: that it is of.
        counts_of: from a model of `stock`, its layers' names -> experts.
    """

    def make(self: Any, config: Any) -> None:
        stock.__init__(self, config)
        counts = counts_of(self)
        for number in sorted(set(counts.values())):
            other = with_count(config, mixture, number)
            donor = stock(other)
            for path in (path for path, count in counts.items() if count == number):
                borrow(self, donor, path, config, other)

    return subclass(stock, __init__=make)


def subclass(stock: Any, **members: Any) -> Any:
    """A subclass of a class of transformers with other members, under the same name."""
    return type(
        stock.__name__, (stock,), {"__module__": stock.__module__, "__doc__": stock.__doc__, **members}
    )


def with_count(config: Any, mixture: Mixture, count: int) -> Any:
    """A copy of a config of transformers that says so many experts, wherever it says a number."""
    changed = copy.deepcopy(config)
    for key in mixture.counts:
        *outer, inner = key.split(".")
        owner = changed
        for part in outer:
            owner = getattr(owner, part)
        if hasattr(owner, inner):
            setattr(owner, inner, count)
    return changed


def borrow(model: Any, donor: Any, path: str, config: Any, other: Any) -> Any:
    """Put a module of `donor`, made of the config `other`, in the place of that of `model`; returns it."""
    configs = dict(zip(map(id, _configs(other)), _configs(config), strict=True))
    borrowed = donor.get_submodule(path)
    for module in borrowed.modules():
        # To the model's own configs, by which it is told later how to run.
        for name, value in [*vars(module).items()]:
            if id(value) in configs:
                setattr(module, name, configs[id(value)])
    model.set_submodule(path, borrowed)
    return borrowed


def _configs(config: Any) -> Iterator[Any]:
    """Yield a config and the configs within it."""
    yield config
    for name in sorted(config.sub_configs):
        if getattr(config, name, None) is not None:
            yield from _configs(getattr(config, name))
