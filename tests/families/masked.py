"""Copies of a model with parts zeroed or taken out by plain torch: what a reduced model must compute.

Nothing here imports prunecli. Names are the modules' own, as `model.get_submodule` takes them.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D


def without_units(
    model: PreTrainedModel, writing: Sequence[str], reading: Sequence[str], units: Sequence[int]
) -> PreTrainedModel:
    """A copy in which FFN units are zero.

    Args:
        writing: modules with a row for each unit (gate, up); their rows and biases become zero.
        reading: modules with a column for each unit (down).
        units: the same rows and columns of all these modules.
    """
    masked = copy.deepcopy(model)
    for name in writing:
        _zero(masked.get_submodule(name), units, rows=True)
    for name in reading:
        _zero(masked.get_submodule(name), units, rows=False)
    return masked


def without_heads(model: PreTrainedModel, output: str, width: int, heads: Iterable[int]) -> PreTrainedModel:
    """A copy in which some heads add nothing: their columns of the output projection are zero.

    Args:
        output: the output projection, with `width` columns for each head, in order.
    """
    masked = copy.deepcopy(model)
    columns = [head * width + column for head in heads for column in range(width)]
    _zero(masked.get_submodule(output), columns, rows=False)
    return masked


def without_layers(model: PreTrainedModel, names: Iterable[str]) -> PreTrainedModel:
    """A copy in which some layers return their input.

    The layers stay in their lists, because many classes look up by position what else a layer is given (its
    mask, its rotary embedding). What a layer returns beside the hidden states (T5's position bias) stays.
    """
    masked = copy.deepcopy(model)
    for name in names:
        masked.get_submodule(name).register_forward_hook(_return_input, with_kwargs=True)
    return masked


def token_logits(logits: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
    """The logits of some tokens, [..., len(tokens)]."""
    return logits[..., list(tokens)]


def logits(model: PreTrainedModel, rows: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The logits of all tokens without a cache, [rows, tokens, vocabulary]."""
    cache = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    with torch.no_grad():
        return model(**rows, **cache).logits


def _return_input(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
    hidden = args[0] if args else kwargs["hidden_states"]
    return (hidden, *output[1:]) if isinstance(output, tuple) else hidden


def _zero(module: nn.Module, units: Sequence[int], *, rows: bool) -> None:
    """Zero the units that the module writes (rows) or reads (columns). A `Conv1D` holds them transposed."""
    weight = module.weight.data
    if rows != isinstance(module, Conv1D):
        weight[list(units)] = 0
    else:
        weight[:, list(units)] = 0
    if rows and module.bias is not None:
        module.bias.data[list(units)] = 0
