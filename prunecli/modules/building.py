"""From an open checkpoint to a running model: the stock class, its sparse FFNs replaced, its tensors read in place."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

import torch
from torch import nn

from prunecli.architectures.records import Architecture
from prunecli.errors import CheckpointError
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.declared import class_names
from prunecli.model.layout import ModelLayout
from prunecli.model.mixtures import SparseLayer
from prunecli.model.opening import WEIGHTS_KEY, result_config
from prunecli.model.structure import KEY
from prunecli.modules.attention import fit_heads, module_name
from prunecli.modules.cpu_linear import speed_up_linears
from prunecli.modules.define import fit_embeddings, has_module, tied_names
from prunecli.modules.ffn import fit_ffn, shared_names
from prunecli.modules.filling import CHUNK_BYTES, expert_names, fill, fill_places, places
from prunecli.modules.saving import saving_as_stored
from prunecli.modules.sparse_ffn import EXPERT_PARTS, SparseFFN


def build_model(
    checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, name: str | None = None
) -> Any:
    """A model in evaluation mode, on `device`, its floating tensors in `dtype` (routers in float32).

    Every tensor is read chunk by chunk into its final place, so no second copy of the weights ever exists.

    Args:
        name: of its class, one of the family's; None: see `model_class`.

    Raises:
        UnsupportedModelError: the family is not declared.
        CheckpointError: a tensor is missing, unexpected or misshapen, or the family has no such class.
    """
    model = assemble(checkpoint, device, dtype, name)
    layers = checkpoint.mixtures
    for layer in layers:
        module = model.get_submodule(module_name(model, layer.name))
        for part in EXPERT_PARTS:
            held = getattr(module, part)
            setattr(module, part, nn.Parameter(torch.empty_like(held, device=device)))
        _fill_experts(module, layer, checkpoint)
    experts = expert_names(layers)
    names = [name for name in checkpoint.tensors if name not in experts]
    found = list(places(model, checkpoint, names, dtype))
    fill_places(found, checkpoint, device)
    complete(model, checkpoint, device)
    family = checkpoint.require_architecture()
    tied = None
    if not checkpoint.structure.embedding.is_stock:
        tied = tied_names(model, checkpoint.layout.ties)
    shared = shared_names(model, checkpoint.layout.ffns)
    config = checkpoint.config
    if KEY in config:  # of the class that is saved, and as this version of prunecli writes it
        held = experts | {place.name for place in found}
        named = None if name is None else (name,)
        config = result_config(checkpoint, checkpoint.structure, held=held, named=named)
    return saving_as_stored(model, config, layers, family.expert_count, shared, tied).eval()


def assemble(
    checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, name: str | None = None
) -> Any:
    """The modules of the model that the checkpoint describes, their parameters on the meta device.

    Args:
        checkpoint: of a declared family.
        device: where the model will run.
        dtype: of its floating tensors.
        name: of its class; None: see `model_class`.

    Raises:
        UnsupportedModelError: the family is not declared.
        CheckpointError: a tensor is missing, unexpected or misshapen, or the family has no such class.
    """
    family = checkpoint.require_architecture()
    checkpoint.check()
    model = _stock_model(checkpoint, family, dtype, name)
    for layer in checkpoint.mixtures:
        _replace(model, layer, checkpoint, family, dtype)
    _fit_heads(model, checkpoint.layout)
    _fit_ffns(model, checkpoint.layout, device)
    if device.type == "cpu":
        speed_up_linears(model)
    return model


def complete(model: Any, checkpoint: Checkpoint, device: torch.device, absent: Container[int] = ()) -> None:
    """Tie what is tied and compute what is computed, once all that the checkpoint stores is in its place.

    Args:
        absent: ids of parameters that may be on the meta device.

    Raises:
        CheckpointError: another parameter still is.
    """
    family = checkpoint.require_architecture()
    _tie(model, checkpoint, family)
    _fill_buffers(model, family, device)
    missing = [name for name, value in model.named_parameters() if value.is_meta and id(value) not in absent]
    if missing:
        raise CheckpointError(
            f"{checkpoint.path}: {missing_tensors(missing)}",
            "config.json and the weights are not of one checkpoint; copy both again.",
        )


def model_class(checkpoint: Checkpoint, name: str | None = None) -> Any:
    """The class of transformers that config.json names, where it is one of the family's; else the declared one.

    A family with experts has the declared one, whatever config.json names: what is done with it is to translate.

    Args:
        name: of the class that is asked for instead.

    Raises:
        CheckpointError: the family has no class of that name.
    """
    import transformers

    family = checkpoint.require_architecture()
    names = class_names(checkpoint.config) if family.top_k is None else ()
    for candidate in (name,) if name is not None else names:
        found = getattr(transformers, candidate, None)
        if getattr(getattr(found, "config_class", None), "model_type", None) == family.model_type:
            return found
    if name is not None:
        known = ", ".join(one.name for one in family.classes) or family.model_class
        raise CheckpointError(f"{checkpoint.path}: no {name} can be made of it", f"Choose one of {known}.")
    return getattr(transformers, family.model_class)


def missing_tensors(names: Sequence[str]) -> str:
    """Which tensors are not there, in words."""
    few = ", ".join((*names[:3], "…") if len(names) > 3 else names)
    return f"{len(names)} tensors are missing ({few})" if len(names) > 1 else f"a tensor is missing ({few})"


def stock_config(checkpoint: Checkpoint, **changes: Any) -> Any:
    """The configuration object of the family's stock class, with `changes` to config.json's values.

    Raises:
        CheckpointError: transformers refuses a value.
    """
    from transformers import CONFIG_MAPPING

    family = checkpoint.require_architecture()
    left_out = (KEY, "auto_map", WEIGHTS_KEY)
    values = {key: value for key, value in checkpoint.config.items() if key not in left_out}
    if names := class_names(checkpoint.config):
        values["architectures"] = list(names)
    values |= {"model_type": family.model_type, **changes}
    try:
        return CONFIG_MAPPING[family.model_type].from_dict(values)
    except Exception as error:  # whatever a value of the wrong kind runs into inside of transformers
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(
            f"{checkpoint.path}/config.json: transformers refuses a value ({reason})",
            "Correct the value, or copy the file again.",
        ) from error


def _stock_model(checkpoint: Checkpoint, family: Architecture, dtype: torch.dtype, name: str | None) -> Any:
    """The stock class on the meta device, with the checkpoint's own embeddings.

    Its sparse layers are about to be replaced, so they get few experts.
    """
    # Nor does the stored type matter, which transformers would look up.
    changes = {**dict.fromkeys(family.expert_count, family.top_k), "dtype": None, "torch_dtype": None}
    made = model_class(checkpoint, name)
    options = _without_pooler(family, made) if not _has(checkpoint, family.pooler) else {}
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # as from_pretrained does: buffers take the type of the model
    try:
        with torch.device("meta"):
            model = made(stock_config(checkpoint, **changes), **options)
    except CheckpointError:
        raise
    except Exception as error:  # whatever a value of the wrong kind runs into inside of transformers
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(
            f"{checkpoint.path}/config.json: transformers cannot make the model ({type(error).__name__}: {reason})",
            "Correct the value, or copy the file again.",
        ) from error
    finally:
        torch.set_default_dtype(previous)
    for key in family.expert_count:
        setattr(model.config, key, checkpoint.layout.sizes.count(key))
    tables = checkpoint.layout.tables
    if tables is not None:
        fit_embeddings(model, tables, dtype)
    return model


def _has(checkpoint: Checkpoint, beginning: str | None) -> bool:
    return beginning is None or any(name.startswith(beginning) for name in checkpoint.tensors)


def _without_pooler(family: Architecture, made: Any) -> dict[str, bool]:
    """The option that makes a base model without its pooler; no other class has it."""
    is_base = bool(family.classes) and made.__name__ == family.classes[0].name
    return {"add_pooling_layer": False} if is_base else {}


def _replace(
    model: Any,
    layer: SparseLayer,
    checkpoint: Checkpoint,
    family: Architecture,
    dtype: torch.dtype,
) -> None:
    """Put a SparseFFN with the layer's own number of experts in the place of the stock module."""
    sizes = checkpoint.layout.sizes
    stack = next(stack for stack in family.stacks if stack.side == layer.side)
    parent, _, name = module_name(model, layer.name).rpartition(".")
    module = SparseFFN(
        int(sizes.value("d_model")),
        int(sizes.value(stack.ffn.width)),
        layer.num_experts,
        top_k=int(family.top_k or 1),
        activation=str(sizes.value("activation_function")),
        router_bias=any(tensor.endswith(".bias") for tensor in layer.router_tensors),
        token_dropout=float(sizes.value(family.token_dropout)) if family.token_dropout else 0.0,
        activation_dropout=float(getattr(model.config, "activation_dropout", 0.0)),
        device="meta",
        dtype=dtype,
    )
    setattr(model.get_submodule(parent), name, module)


def _fit_heads(model: Any, layout: ModelLayout) -> None:
    for layer in layout.attentions:
        if not layer.is_whole:
            fit_heads(model, layer.spec, layer, layer.stated_heads, layout.shapes)


def _fit_ffns(model: Any, layout: ModelLayout, device: torch.device) -> None:
    for layer in sorted(layout.ffns, key=lambda layer: layer.is_shared):  # owners first
        if not layer.is_sparse:
            width = layout.sizes.count(layer.stack.ffn.width)
            fit_ffn(model, layer.stack, layer, width, layout.shapes, device)


def _fill_experts(module: SparseFFN, layer: SparseLayer, checkpoint: Checkpoint) -> None:
    buffer = bytearray(CHUNK_BYTES)
    for part, suffix in EXPERT_PARTS.items():
        stacked = getattr(module, part)
        for expert in range(layer.num_experts):
            fill(stacked[expert], checkpoint, layer.expert_tensor(expert, suffix), buffer)


def _tie(model: Any, checkpoint: Checkpoint, family: Architecture) -> None:
    """Give every alias that the checkpoint leaves out the parameter that it stands for."""
    aliases = checkpoint.layout.ties
    # T5 would tie what is apart, as every family would where the output layer no longer has the input's table.
    if checkpoint.structure.embedding.is_stock and not any(
        alias in checkpoint.tensors for alias in family.tied
    ):
        model.tie_weights()  # the aliases of task heads too
    for alias, name in aliases.items():
        owner, _, attribute = module_name(model, alias).rpartition(".")
        if alias not in checkpoint.tensors and has_module(model, owner):
            setattr(model.get_submodule(owner), attribute, model.get_parameter(module_name(model, name)))


def _fill_buffers(model: Any, family: Architecture, device: torch.device) -> None:
    """Compute what the model computes at its making and does not store: positions, for one; a parameter in Marian."""
    for path, module in model.named_modules():
        empty = {name: held for name, held in module.named_buffers(recurse=False) if held.is_meta}
        for name, held in empty.items():
            module.register_buffer(name, torch.empty_like(held, device=device), persistent=False)
        computed = {
            name: held
            for name, held in module.named_parameters(recurse=False)
            if held.is_meta and f"{path}.{name}".endswith(family.buffers)
        }
        for name, held in computed.items():
            made = torch.empty_like(held, device=device)
            setattr(module, name, nn.Parameter(made, requires_grad=held.requires_grad))
        if empty or computed:
            for name, held in module.named_parameters(recurse=False):
                if (
                    name not in computed
                ):  # rows that were read, in Gemma's tables: transformers must not draw them
                    held._is_hf_initialized = True
            model._init_weights(module)
