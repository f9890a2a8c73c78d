"""DeFINE units in the place of a stock model's token embeddings, and the output layer that reads a map table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from prunecli.model.define import UnitShape
from prunecli.model.embedding import TokenTables
from prunecli.modules.attention import module_name
from prunecli.modules.define import DefineEmbedding, DefineOutput


def fit_embeddings(model: Any, tables: TokenTables, dtype: torch.dtype) -> None:
    """Make the token embeddings of a stock model, built on the meta device, those that `tables` describes.

    The unit stands in the place of every module that shares the input table: one module, whose Parameters are there
    once. It takes over the factor of the module that it replaces. The output layer becomes logits (h P) U^T.
    """
    if tables.unit is not None:
        _replace_input(model, tables, dtype)
    output = tables.change.output
    name = module_name(model, tables.output)
    if output is not None and output.map_dim is not None and has_module(model, name):
        stock: Any = model.get_submodule(name)
        shape = UnitShape(tables.vocabulary, output.map_dim, tables.model_dim, kind="projective")
        made = DefineOutput(shape, bias=stock.bias is not None, device="meta", dtype=dtype)
        model.set_submodule(name, made)


def _replace_input(model: Any, tables: TokenTables, dtype: torch.dtype) -> None:
    assert tables.unit is not None
    unit: DefineEmbedding | None = None
    for name in (tables.input, *tables.aliases):
        place = module_name(model, name)
        if not has_module(model, place):
            continue
        if unit is None:
            stock = model.get_submodule(place)
            unit = DefineEmbedding(
                tables.unit,
                padding_idx=padding_id(model.config, tables),
                scale=_scale(stock, dtype),
                device="meta",
                dtype=dtype,
            )
        model.set_submodule(place, unit)


def _scale(stock: Any, dtype: torch.dtype) -> float:
    """The factor of the rows of a stock module. Gemma's is a buffer, not yet computed, and rounded as the rows are."""
    if (whole := getattr(stock, "scalar_embed_scale", None)) is not None:
        return float(torch.tensor(whole, dtype=dtype))
    return float(getattr(stock, "embed_scale", 1.0))


def padding_id(config: Any, tables: TokenTables) -> int | None:
    """The token whose row the unit leaves zero; None where it treats the padding token as any other."""
    unit, found = tables.change.input, getattr(config, "pad_token_id", None)
    if unit is None or not unit.zero_padding or not isinstance(found, int):
        return None
    return found if 0 <= found < tables.vocabulary else None


def has_module(model: Any, name: str) -> bool:
    """Whether the model has a module of this name."""
    try:
        model.get_submodule(name)
    except AttributeError:
        return False
    return True


def tied_names(model: Any, ties: Mapping[str, str]) -> dict[str, str]:
    """Those of the `ties` of a checkpoint that concern the model, under its own names: alias -> what it is tied to."""
    found = {module_name(model, alias): module_name(model, name) for alias, name in ties.items()}
    return {alias: name for alias, name in found.items() if has_module(model, alias.rpartition(".")[0])}
