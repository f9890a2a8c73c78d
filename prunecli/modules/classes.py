"""The class of transformers that a checkpoint runs in as it is, and that class fitted to layers that differ.

A stock class knows one number of experts for all layers. A model of the stock class is made for each number, without
values, and each layer is taken from the model of its own number: so transformers' classes make all modules, and their
own rules fill and store them.

Where constants stand for some experts (2507.00390, MoNE), the router goes on choosing among all experts. The module of
experts is that of a model with as many as are computed, and adds the constants' part to its output.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import reduce
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from prunecli.architectures.records import Mixture
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.declared import class_names
from prunecli.model.layout import ModelLayout
from prunecli.model.mixtures import stated_counts
from prunecli.model.names import layer_of
from prunecli.model.patchwork import Names, fit_layers, fitted, has_part, module_name
from prunecli.model.skeleton import (
    Skeleton,
    class_named,
    config_class,
    require_depth,
    skeleton_of,
    subclass,
    transformers_takes,
)
from prunecli.model.sparse_layer import CONSTANT, SparseLayer
from prunecli.model.structure import WEIGHTS_KEY
from prunecli.modules.define import fit_embeddings
from prunecli.modules.filling import require_shape, tensors_of
from prunecli.modules.saving import tie_parameters
from prunecli.modules.stock_experts import expert_modules
from prunecli.modules.stock_names import StockNames
from prunecli.private import UNEXPECTED, model_from_config, with_special_floats


@contextmanager
def making(checkpoint: Checkpoint) -> Iterator[None]:
    """Inside, models of transformers' classes are made on the meta device, without values.

    Raises:
        CheckpointError: transformers refuses a value of config.json.
    """
    from transformers.initialization import no_init_weights

    with transformers_takes(checkpoint.path / "config.json"), torch.device("meta"), no_init_weights():
        yield


def stock_class(checkpoint: Checkpoint, name: str | None = None) -> Any:
    """The class of transformers of this name; None: the one that config.json names, or else one of the model type.

    None for an NLLB-MoE: the class that translates.

    Raises:
        UnsupportedModelError: there is none, or it is of another family.
        CheckpointError: config.json names no type.
    """
    if not name and checkpoint.runs_stock:
        name = checkpoint.own_class or next(iter(class_names(checkpoint.config)), None)
    if not name:
        if checkpoint.family is None:
            return skeleton_of(checkpoint).model_class
        name = checkpoint.family.model_class
    return class_named(checkpoint, name, checkpoint.tensors)


def own_config(checkpoint: Checkpoint, model_class: Any, **changes: Any) -> Any:
    """The config object of a class, with `changes` to the values of config.json.

    The reason why no stock class opens a result is left out.

    Raises:
        CheckpointError: transformers refuses a value.
    """
    own = config_class(checkpoint, model_class)
    values = {key: value for key, value in checkpoint.config.items() if key != WEIGHTS_KEY} | changes
    with transformers_takes(checkpoint.path / "config.json"):
        return own.from_dict(with_special_floats(own, values))


def empty_model(checkpoint: Checkpoint, model_class: Any, **options: Any) -> Any:
    """A model of the class on the meta device, without values.

    Raises:
        CheckpointError: transformers refuses a value of config.json.
    """
    require_depth(checkpoint)
    with making(checkpoint):
        config = own_config(checkpoint, model_class)
        config.get_text_config().output_router_logits = False  # a layer that answers has none
        return model_from_config(model_class, config, **options)


def fitted_class(checkpoint: Checkpoint, name: str | None) -> Any:
    """`stock_class`; where layers differ, a subclass of it that gives each layer what the checkpoint has in it.

    Raises:
        UnsupportedModelError: as `stock_class`.
        CheckpointError: config.json says more layers than there can be.
    """
    require_depth(checkpoint)
    stock, family = stock_class(checkpoint, name), checkpoint.family
    # Not that of a whole mixture, nor one of which the experts alone differ.
    structure = checkpoint.structure
    is_changed = structure.of_kind("head") or structure.shared or structure.removed or structure.widths
    if (is_changed or not structure.embedding.is_stock) and WEIGHTS_KEY in checkpoint.config:
        layout = checkpoint.layout
        skeleton = replace(layout.family.found.skeleton, model_class=stock)

        def fit_found(model: Any) -> None:
            fit_model(model, checkpoint, layout, skeleton, StockNames(checkpoint, model).place)

        # transformers looks for what is shared among the parameters: I-BERT's FFNs have buffers.
        stock = subclass(
            fitted(stock, fit_found),
            tie_weights=tie_parameters,
            get_parameter=lambda model, name: attrgetter(name)(model),
        )
    mixture = None if family is None else family.mixture
    if mixture is None:
        return stock
    layers = [layer for layer in checkpoint.mixtures if not layer.is_predicting]
    if any(layer.constants for layer in layers):
        return _class_of_constants(stock, mixture, layers)
    counts = {layer.num_experts for layer in layers}
    stated = {*stated_counts(checkpoint.resolved.sizes, mixture).values()} or counts
    if counts <= stated:
        return stock

    def fit(model: Any) -> None:
        counts = {module_name(model, layer_of(layer.name)): layer.num_experts for layer in layers}
        _give_counts(stock, mixture, counts, model)

    return fitted(stock, fit)


def fit_model(
    model: Any,
    checkpoint: Checkpoint,
    layout: ModelLayout,
    skeleton: Skeleton,
    names: Names,
) -> None:
    """Give a model of a stock class, made on the meta device, the layers and embeddings of the checkpoint.

    Args:
        layout: of the checkpoint.
        skeleton: of the model.
        names: of tensors in the model.
    """
    is_stock = layout.structure.embedding.is_stock
    if layout.tables is not None and not is_stock:
        fit_embeddings(model, layout.tables, names)
    aliases, ties = fit_layers(model, layout, skeleton, names), model.all_tied_weights_keys
    # T5 would tie what is apart, as every family would where the output layer no longer has the input's table.
    if not is_stock or any(alias in checkpoint.tensors for alias in layout.family.tied):
        ties = {
            own: names(name)
            for alias, name in layout.ties.items()
            if alias not in checkpoint.tensors and has_part(model, own := names(alias))
        }
    if not is_stock:
        model._own_ties = ties
        aliases |= ties
    model._shared_names = aliases
    model.all_tied_weights_keys = ties | aliases


def _class_of_constants(stock: Any, mixture: Mixture, layers: Sequence[SparseLayer]) -> Any:
    """A subclass of `stock` with constants in the place of some experts; `fill_constants` gives them their values.

    Args:
        layers: of the checkpoint, those that predict further tokens aside.
    """

    def fit(model: Any) -> None:
        changed = {
            path: layer for layer, path in zip(layers, expert_modules(model), strict=True) if layer.constants
        }
        counts = {path: len(layer.computed) for path, layer in changed.items()}
        _give_counts(stock, mixture, counts, model)
        for path, layer in changed.items():
            module = model.get_submodule(path)
            module.__class__ = _class_of_experts(type(module))
            module.own_layer = layer

    def save_pretrained(_self: Any, *_: Any, **__: Any) -> None:
        raise ValueError(
            "constants stand for experts of this model: copy the directory that it was loaded from."
        )

    ignored = [*(getattr(stock, UNEXPECTED, None) or ()), rf"\.{CONSTANT}$"]
    return subclass(fitted(stock, fit), save_pretrained=save_pretrained, **{UNEXPECTED: ignored})


def fill_constants(model: Any, checkpoint: Checkpoint) -> None:
    """Read the constants of a model whose class `fitted_class` made for them.

    Raises:
        CheckpointError: one cannot be read, or is not as wide as the layer.
    """
    for module in model.modules():
        layer: SparseLayer | None = getattr(module, "own_layer", None)
        if layer is None:
            continue
        names = [layer.expert_tensor(number, CONSTANT) for number in layer.constants]
        weight = module.down_proj
        for name in names:
            require_shape(weight[0, 0] if module.is_transposed else weight[0, :, 0], checkpoint, name)
        values = torch.stack([*tensors_of(checkpoint, names, weight.dtype)])
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


def _give_counts(stock: Any, mixture: Mixture, counts: Mapping[str, int], model: Any) -> None:
    """Put modules with other numbers of experts in the place of those of a model of `stock`.

    Args:
        mixture: that the class is of.
        counts: module's name -> experts.
    """
    for number in sorted({*counts.values()}):
        # Made of the model's own config, by which its modules are told later how to run.
        with _stating(model.config, mixture.counts, number):
            donor = stock(model.config)
        for path in (path for path, count in counts.items() if count == number):
            model.set_submodule(path, donor.get_submodule(path))


@contextmanager
def _stating(config: Any, keys: Sequence[str], count: int) -> Iterator[None]:
    """Inside, a config of transformers says so many experts, wherever it says a number."""
    with ExitStack() as undone:
        for key in keys:
            *outer, inner = key.split(".")
            owner = reduce(getattr, outer, config)
            if hasattr(owner, inner):
                undone.callback(setattr, owner, inner, getattr(owner, inner))
                setattr(owner, inner, count)
        yield
