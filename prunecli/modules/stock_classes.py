"""The class of transformers that a checkpoint runs in as it is, and one fitted to layers of unequal experts."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from prunecli.model.checkpoint import Checkpoint
from prunecli.model.declared import class_names
from prunecli.model.layout import ModelLayout
from prunecli.model.mixtures import stated_counts
from prunecli.model.patchwork import fit_layers, fitted, subclass
from prunecli.model.skeleton import class_named, classes_of_type, config_class, require_depth
from prunecli.model.structure import WEIGHTS_KEY
from prunecli.modules.building import making
from prunecli.modules.constant_experts import class_of_constants, class_of_counts
from prunecli.modules.define import fit_embeddings
from prunecli.modules.saving import tie_parameters
from prunecli.modules.stock_names import StockNames
from prunecli.private import model_from_config


def stock_class(checkpoint: Checkpoint, name: str | None = None) -> Any:
    """The class of transformers of this name; None: the one that config.json names, or else one of the model type.

    Raises:
        UnsupportedModelError: there is none, or it is of another family.
        CheckpointError: config.json names no type.
    """
    if name is None:
        name = next(iter(class_names(checkpoint.config)), "") or _class_of_type(checkpoint)
    return class_named(checkpoint, name)


def _class_of_type(checkpoint: Checkpoint) -> str:
    """The first class of the model's type whose parameters are all there."""
    if checkpoint.family is not None:
        return checkpoint.family.model_class
    for name in classes_of_type(checkpoint.model_type):
        model = empty_model(checkpoint, stock_class(checkpoint, name))
        names = StockNames(checkpoint, model)
        held = {*model.all_tied_weights_keys, *map(names.parameter, checkpoint.tensors)}
        if held >= {parameter for parameter, _ in model.named_parameters()}:
            return name
    return ""


def empty_model(checkpoint: Checkpoint, model_class: Any, **options: Any) -> Any:
    """A model of the class on the meta device, without values.

    Raises:
        CheckpointError: transformers refuses a value of config.json.
    """
    require_depth(checkpoint)
    with making(checkpoint):
        own = config_class(checkpoint, model_class)
        config = own.from_pretrained(checkpoint.path, local_files_only=True)
        config.get_text_config().output_router_logits = False  # a layer that answers has none
        return model_from_config(model_class, config, **options)


def fitted_class(checkpoint: Checkpoint, name: str | None = None) -> Any:
    """`stock_class`; where layers differ in their number of experts, a subclass of it that gives each its own.

    Raises:
        UnsupportedModelError: as `stock_class`.
        CheckpointError: config.json says more layers than there can be.
    """
    require_depth(checkpoint)
    stock, family = stock_class(checkpoint, name), checkpoint.family
    # Not that of a whole mixture, nor one of which the experts alone differ.
    structure = checkpoint.structure
    is_changed = structure.of_kind("head") or structure.shared or structure.removed or structure.widths
    if (
        (is_changed or not structure.embedding.is_stock)
        and WEIGHTS_KEY in checkpoint.config
        and checkpoint.architecture is None
    ):
        made = fitted(stock, partial(_fit, checkpoint, checkpoint.layout, stock))
        stock = subclass(made, tie_weights=tie_parameters)
    mixture = None if family is None else family.mixture
    if mixture is None:
        return stock
    layers = [layer for layer in checkpoint.mixtures if not layer.is_predicting]
    if any(layer.constants for layer in layers):
        return class_of_constants(stock, mixture, layers)
    counts = {layer.num_experts for layer in layers}
    stated = {*stated_counts(checkpoint.resolved.sizes, mixture).values()} or counts
    if counts <= stated:
        return stock

    def counts_of(model: Any) -> dict[str, int]:
        names = StockNames(checkpoint, model)
        places = {names.place(layer.router_tensors[0]): layer.num_experts for layer in layers}
        return {re.sub(r"(\.\d+)\..*", r"\1", place): count for place, count in places.items()}

    return class_of_counts(stock, mixture, counts_of)


def _fit(checkpoint: Checkpoint, layout: ModelLayout, stock: Any, model: Any) -> None:
    """Make a model of the stock class, at its making, what the checkpoint of a found family describes."""
    names = StockNames(checkpoint, model)
    skeleton = replace(layout.family.found.skeleton, model_class=stock)
    aliases = fit_layers(model, layout, skeleton, names.place)
    ties = model.all_tied_weights_keys
    if layout.tables is not None and not layout.structure.embedding.is_stock:
        ties = {names.place(alias): names.place(name) for alias, name in layout.ties.items()}
        fit_embeddings(model, layout.tables, torch.get_default_dtype(), names.place)
        model._own_ties = ties
        aliases |= ties
    model._shared_names = aliases
    model.all_tied_weights_keys = ties | aliases
