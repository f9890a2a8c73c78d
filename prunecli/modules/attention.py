"""Attentions with fewer heads, shared or removed, in the place of a stock model's."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from prunecli.model.attention import AttentionLayer
from prunecli.modules.absent import NoAttention, Nothing

SUBSET = "prunecli_heads"
"""Name of the attention function that takes a position bias of all heads."""


class NoHeads(nn.Module):
    """In the place of a projection to queries, keys or values where no head is left: one head of zeros.

    A head of zeros, rather than none, keeps caches and shapes of the stock module valid.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, hidden_states: Tensor) -> Tensor:
        """`[..., d_model]` -> zeros `[..., width]`."""
        return hidden_states.new_zeros(*hidden_states.shape[:-1], self.width)


class OnlyBias(nn.Module):
    """In the place of an output projection where no head is left: its bias stays."""

    def __init__(self, width: int, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.width = width
        self.bias = bias

    def forward(self, hidden_states: Tensor) -> Tensor:
        """`[..., one head]` -> the bias, or zeros, `[..., d_model]`."""
        made = hidden_states.new_zeros(*hidden_states.shape[:-1], self.width)
        return made if self.bias is None else made + self.bias


def fit_attention(
    model: nn.Module, layer: AttentionLayer, shapes: Mapping[str, tuple[int, ...]], device: torch.device
) -> None:
    """Make an attention of a stock model, built on the meta device, the one that `layer` describes.

    A removed one and its norms no longer compute, as of an FFN. A shared one stays a module of its own, which knows its
    place in a cache, its window and its positions; its projections become its owner's, whose Parameters are there once.

    Args:
        model: the stock model; the attention that this one shares with is fitted already.
        layer: what the checkpoint holds.
        shapes: name -> shape of the tensors that the checkpoint stores.
        device: where the model will run.
    """
    if layer.removed:
        block = layer.name.removesuffix(layer.spec.name)
        for norm in layer.spec.norms:
            model.set_submodule(module_name(model, f"{block}{norm}"), nn.Identity())
        stock = module_name(model, f"{block}{layer.spec.projections or layer.spec.name}")
        number = layer.layer if layer.kind == "decoder" else None  # only a decoder's has a cache
        none = NoAttention(number, position_bias=layer.spec.position_bias, device=device)
        model.set_submodule(stock, none)
        if not module_name(model, layer.output).startswith(f"{stock}."):
            model.set_submodule(module_name(model, layer.output), Nothing(device))
        return
    if not layer.is_whole:
        own = {name: shapes[stored] for name, stored in layer.shared_tensors.items() if stored in shapes}
        fit_heads(model, layer, {**shapes, **own})
    for own_path, path in dict.fromkeys(
        (own.rpartition(".")[0], stored.rpartition(".")[0]) for own, stored in layer.shared_tensors.items()
    ):
        model.set_submodule(module_name(model, own_path), model.get_submodule(module_name(model, path)))


def fit_heads(model: nn.Module, layer: AttentionLayer, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Give a stock attention, built with all heads on the meta device, the shapes of those that `layer` holds.

    Args:
        model: the stock model that the attention is part of.
        layer: what the checkpoint holds.
        shapes: name -> shape of the tensors that the checkpoint stores.
    """
    attention, built_heads = layer.spec, layer.stated_heads
    owner = layer.name.removesuffix(attention.name)
    stock: Any = model.get_submodule(module_name(model, f"{owner}{attention.projections or attention.name}"))
    output = module_name(model, layer.output)
    width = 0
    for name, axis in layer.tensors.items():
        path, _, attribute = module_name(model, name).rpartition(".")
        module: Any = model.get_submodule(path)
        if isinstance(module, (NoHeads, OnlyBias)):
            continue
        whole = getattr(module, attribute).shape
        width = axis.unit(whole[axis.dim], built_heads)
        if layer.heads:
            resize(module, attribute, shapes[name])
        elif path == output:
            others = math.prod(size for index, size in enumerate(whole) if index != axis.dim)
            model.set_submodule(path, OnlyBias(others, module.bias))
        else:
            model.set_submodule(path, NoHeads(sum(axis.blocks) * width))
    for attribute, what in attention.attributes.items():
        heads = max(layer.num_heads, 1)
        setattr(stock, attribute, heads if what == "heads" else heads * width)
    if attention.config_counts:
        stock.config = copy.copy(stock.config)
        for key in attention.config_counts:
            counted = getattr(stock.config, key)
            setattr(stock.config, key, counted // built_heads * max(layer.num_heads, 1))
    if attention.position_bias:  # it is given that of all heads, and uses that of its own ones
        from transformers import AttentionInterface

        AttentionInterface.register(SUBSET, _attend)
        stock.stock_config = stock.config
        stock.config = copy.copy(stock.config)
        stock.config._attn_implementation_internal = SUBSET
        stock.heads = layer.heads or (0,)


def module_name(model: Any, name: str) -> str:
    """The name in `model` of what the stock layout calls `name`: a base model lacks the first part of the names."""
    prefix = f"{model.base_model_prefix}."
    return name if hasattr(model, model.base_model_prefix) else name.removeprefix(prefix)


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """The stock attention function over the part of `position_bias` that belongs to the module's heads."""
    from transformers import AttentionInterface

    bias = options.pop("position_bias", None)
    if bias is not None:
        bias = bias[:, list(module.heads)]
    eager = sys.modules[type(module).__module__].eager_attention_forward
    attend = AttentionInterface().get_interface(module.stock_config._attn_implementation, eager)
    result: tuple[Tensor, Tensor | None] = attend(
        module, query, key, value, mask, position_bias=bias, **options
    )
    return result


def resize(module: Any, attribute: str, shape: tuple[int, ...]) -> None:
    """Give a linear layer's weight or bias another shape; its values are lost."""
    parameter = getattr(module, attribute)
    empty = torch.empty(shape, dtype=parameter.dtype, device=parameter.device)
    setattr(module, attribute, nn.Parameter(empty, requires_grad=parameter.requires_grad))
    if attribute != "weight":
        return
    if isinstance(module, nn.Linear):
        module.out_features, module.in_features = shape
    else:  # GPT-2's Conv1D, whose weight is [in, out]
        module.nx, module.nf = shape


def output_projections(model: nn.Module, layers: Sequence[AttentionLayer]) -> dict[str, nn.Module]:
    """Attention's name -> the linear layer that mixes its heads; those without heads of their own are left out.

    Its input `[..., heads x width]` holds Att_h(x) of 2.3 before the head's part of the projection, in the order
    of `layer.heads`, each head with the same width.
    """
    return {
        layer.name: model.get_submodule(module_name(model, layer.output))
        for layer in layers
        if layer.heads and not layer.is_shared
    }


@contextmanager
def masked_heads(
    model: nn.Module, layers: Sequence[AttentionLayer], masks: Mapping[str, Tensor]
) -> Iterator[None]:
    """Within the block, each head's output is multiplied by its mask xi_h (2.3): 0 removes it.

    Args:
        layers: those of the checkpoint that the model was loaded from.
        masks: attention's name -> `[heads]`, in the order of `layer.heads`.
    """
    projections = output_projections(model, layers)
    with ExitStack() as hooks:
        for name, mask in masks.items():
            hooks.callback(projections[name].register_forward_pre_hook(partial(_weigh, mask)).remove)
        yield


def _weigh(mask: Tensor, _: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    context, *rest = inputs
    weights = mask.to(context.device, context.dtype)
    by_head = context.reshape(*context.shape[:-1], len(weights), -1) * weights[:, None]
    return (by_head.reshape(context.shape), *rest)
