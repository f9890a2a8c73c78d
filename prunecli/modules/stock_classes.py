"""The class of transformers that a checkpoint runs in as it is, and one fitted to layers of unequal experts."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import partial
from typing import Any

from prunecli.errors import CheckpointError, UnsupportedModelError
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.declared import class_names, depths_beyond
from prunecli.model.mixtures import stated_counts
from prunecli.model.sparse_layer import SparseLayer
from prunecli.modules.constant_experts import class_of_constants
from prunecli.modules.stock_names import StockNames
from prunecli.modules.uneven import class_of_counts

SHARED_LAYERS = 1000
"""Layers that a model may have with fewer tensors than layers: all may share one's, as in ALBERT."""


def stock_class(checkpoint: Checkpoint, name: str | None = None) -> Any:
    """The class of transformers of this name; None: the one that config.json names.

    Raises:
        UnsupportedModelError: there is none, or it is of another family.
    """
    import transformers

    if name is None:
        name = next(iter(class_names(checkpoint.config)), "")
    found = getattr(transformers, name, None)
    config_class = getattr(found, "config_class", None)
    # `architectures` alone is not believed: a class of another family would fill what it lacks with random numbers.
    if found is None or getattr(config_class, "model_type", None) != checkpoint.model_type:
        raise UnsupportedModelError(
            f'{checkpoint.path}: the model family "{checkpoint.model_type}" is unknown here '
            f"(class {name or 'not given'})",
            "Check model_type and architectures in its config.json.",
        )
    return found


def fitted_class(checkpoint: Checkpoint, name: str | None = None) -> Any:
    """`stock_class`; where layers differ in their number of experts, a subclass of it that gives each its own.

    Raises:
        UnsupportedModelError: as `stock_class`.
        CheckpointError: config.json says more layers than there can be.
    """
    _require_depth(checkpoint)
    stock, family = stock_class(checkpoint, name), checkpoint.family
    mixture = None if family is None else family.mixture
    if mixture is None:
        return stock
    layers = [layer for layer in checkpoint.mixtures if not layer.is_predicting]
    if any(layer.constants for layer in layers):
        return class_of_constants(stock, mixture, layers)
    counts = {layer.num_experts for layer in layers}
    stated = {*stated_counts(checkpoint.resolved.sizes, mixture).values()} or counts
    return (
        stock if counts <= stated else class_of_counts(stock, mixture, partial(_counts, checkpoint, layers))
    )


def _require_depth(checkpoint: Checkpoint) -> None:
    """Refuse depths that transformers would make one layer after another for hours."""
    most = max(SHARED_LAYERS, len(checkpoint.tensors))
    for key, depth in depths_beyond(checkpoint.config, most).items():
        raise CheckpointError(
            f"{checkpoint.path}/config.json: {key} is {depth:,}, and the checkpoint has "
            f"{len(checkpoint.tensors):,} tensors",
            "Correct the value, or copy the file again.",
        )


def _counts(checkpoint: Checkpoint, layers: Iterable[SparseLayer], model: Any) -> dict[str, int]:
    """Name of each layer of the model that has experts -> how many."""
    names = StockNames(checkpoint, model)
    places = {names.place(layer.router_tensors[0]): layer.num_experts for layer in layers}
    return {re.sub(r"(\.\d+)\..*", r"\1", place): count for place, count in places.items()}
