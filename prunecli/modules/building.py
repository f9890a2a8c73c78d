"""From an open checkpoint to a running model: the stock class, its sparse FFNs replaced, its tensors read in place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from prunecli.architectures.records import Architecture
from prunecli.checkpoint.attention import attention_layers, attentions
from prunecli.checkpoint.declared import class_names, config_value, count
from prunecli.checkpoint.embedding import declared_tables, ties
from prunecli.checkpoint.ffn import FfnLayer, ffn_layers
from prunecli.checkpoint.layout import (
    SparseLayer,
    check_tensors,
    expected_tensors,
    held_sparse_layers,
    is_extra,
)
from prunecli.checkpoint.reader import Checkpoint
from prunecli.checkpoint.structure import KEY
from prunecli.errors import CheckpointError
from prunecli.modules.attention import fit_heads, module_name
from prunecli.modules.embeddings import fit_embeddings, has_module, tied_names
from prunecli.modules.ffn import fit_ffn, shared_names
from prunecli.modules.saving import saving_as_stored
from prunecli.modules.sparse_ffn import SparseFFN

CHUNK_BYTES = 16 << 20
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
}
"""safetensors' names of types -> torch's."""


def build_model(checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> Any:
    """A model in evaluation mode, on `device`, its floating tensors in `dtype` (routers in float32).

    Every tensor is read chunk by chunk into its final place, so no second copy of the weights ever exists.

    Raises:
        UnsupportedModelError: the family is not declared.
        CheckpointError: a tensor is missing, unexpected or misshapen.
    """
    family = checkpoint.require_architecture()
    check_tensors(checkpoint)
    layers = held_sparse_layers(checkpoint)
    ffns = ffn_layers(checkpoint)
    model = _stock_model(checkpoint, family, dtype)
    for layer in layers:
        _replace(model, layer, checkpoint, family, device, dtype)
    _fit_heads(model, checkpoint, family)
    _fit_ffns(model, ffns, checkpoint, family, device)
    _read_tensors(model, checkpoint, layers, device, dtype)
    _tie(model, checkpoint, family)
    _fill_buffers(model, family, device)
    _require_complete(model, checkpoint)
    tied = None
    if not checkpoint.structure.embedding.is_stock:
        tied = tied_names(model, ties(family, checkpoint.config, checkpoint.structure))
    shared = shared_names(model, ffns)
    return saving_as_stored(model, checkpoint.config, layers, family.expert_count, shared, tied).eval()


def model_class(checkpoint: Checkpoint) -> Any:
    """The class of transformers that config.json names, where it is one of the family's; else the declared one.

    A family with experts has the declared one alone: their places in it are known.
    """
    import transformers

    family = checkpoint.require_architecture()
    for name in class_names(checkpoint.config) if family.top_k is None else ():
        found = getattr(transformers, name, None)
        if getattr(getattr(found, "config_class", None), "model_type", None) == family.model_type:
            return found
    return getattr(transformers, family.model_class)


def stock_config(checkpoint: Checkpoint, **changes: Any) -> Any:
    """The configuration object of the family's stock class, with `changes` to config.json's values."""
    from transformers import CONFIG_MAPPING

    family = checkpoint.require_architecture()
    values = {key: value for key, value in checkpoint.config.items() if key not in (KEY, "auto_map")}
    return CONFIG_MAPPING[family.model_type].from_dict({**values, "model_type": family.model_type, **changes})


def _stock_model(checkpoint: Checkpoint, family: Architecture, dtype: torch.dtype) -> Any:
    """The stock class on the meta device, with the checkpoint's own embeddings.

    Its sparse layers are about to be replaced, so they get few experts.
    """
    # Nor does the stored type matter, which transformers would look up.
    changes = {**dict.fromkeys(family.expert_count, family.top_k), "dtype": None, "torch_dtype": None}
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # as from_pretrained does: buffers take the type of the model
    try:
        with torch.device("meta"):
            model = model_class(checkpoint)(stock_config(checkpoint, **changes))
    except Exception as error:  # whatever a value of the wrong kind runs into inside of transformers
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"{checkpoint.path}/config.json: transformers cannot make the model ({type(error).__name__}: {reason})",
            "Correct the value, or copy the file again.",
        ) from error
    finally:
        torch.set_default_dtype(previous)
    for key in family.expert_count:
        setattr(model.config, key, count(family, checkpoint.config, key))
    tables = declared_tables(family, checkpoint.config, checkpoint.structure)
    if tables is not None:
        fit_embeddings(model, tables, dtype)
    return model


def _replace(
    model: Any,
    layer: SparseLayer,
    checkpoint: Checkpoint,
    family: Architecture,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Put an empty SparseFFN with the layer's own number of experts in the place of the stock module."""
    config = checkpoint.config
    stack = next(stack for stack in family.stacks if stack.side == layer.side)
    parent, _, name = layer.name.rpartition(".")
    module = SparseFFN(
        int(config_value(family, config, "d_model")),
        int(config_value(family, config, stack.ffn.width)),
        layer.num_experts,
        top_k=int(family.top_k or 1),
        activation=str(config_value(family, config, "activation_function")),
        router_bias=any(tensor.endswith(".bias") for tensor in layer.router_tensors),
        token_dropout=float(config_value(family, config, family.token_dropout))
        if family.token_dropout
        else 0.0,
        activation_dropout=float(getattr(model.config, "activation_dropout", 0.0)),
        device="meta",
        dtype=dtype,
    )
    setattr(model.get_submodule(parent), name, module.to_empty(device=device))


def _fit_heads(model: Any, checkpoint: Checkpoint, family: Architecture) -> None:
    shapes = expected_tensors(family, checkpoint.config, checkpoint.structure)
    held = {layer.name: layer for layer in attention_layers(checkpoint)}
    for stack, attention, number in attentions(family, checkpoint.config):
        layer = held[f"{stack.layers.format(layer=number)}.{attention.name}"]
        counted = count(family, checkpoint.config, attention.heads)
        if layer.heads != tuple(range(counted)):
            fit_heads(model, attention, layer, counted, shapes)


def _fit_ffns(
    model: Any,
    layers: tuple[FfnLayer, ...],
    checkpoint: Checkpoint,
    family: Architecture,
    device: torch.device,
) -> None:
    shapes = expected_tensors(family, checkpoint.config, checkpoint.structure)
    for layer in sorted(layers, key=lambda layer: layer.is_shared):  # owners first
        stack = next(stack for stack in family.stacks if stack.side == layer.side)
        if not layer.is_sparse:
            width = count(family, checkpoint.config, stack.ffn.width)
            fit_ffn(model, stack, layer, width, shapes, device)


def _read_tensors(
    model: Any,
    checkpoint: Checkpoint,
    layers: tuple[SparseLayer, ...],
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    buffer = bytearray(CHUNK_BYTES)
    sparse: set[str] = set()
    for layer in layers:
        module = model.get_submodule(layer.name)
        for name in layer.router_tensors:
            _fill(getattr(module.router, name.rpartition(".")[2]), checkpoint, name, buffer)
            sparse.add(name)
        for suffix in layer.expert_tensors:
            stacked = getattr(module, suffix.replace(".", "_"))
            for expert in range(layer.num_experts):
                name = layer.expert_tensor(expert, suffix)
                _fill(stacked[expert], checkpoint, name, buffer)
                sparse.add(name)
    for name, info in checkpoint.tensors.items():
        if name in sparse:
            continue
        owner, _, attribute = module_name(model, name).rpartition(".")
        try:
            module = model.get_submodule(owner)
            place = getattr(module, attribute)
        except AttributeError:
            if is_extra(checkpoint.require_architecture(), name):  # another class of the family has it
                continue
            raise CheckpointError(
                f"{checkpoint.path}: the model has no place for the tensor {name}"
            ) from None
        kind = _dtype_of(model, owner, dtype) if place.is_floating_point() else place.dtype
        made = torch.empty(place.shape, dtype=kind, device=device)
        if tuple(place.shape) != info.shape:
            raise CheckpointError(
                f"{checkpoint.path}: {name} has the shape {list(info.shape)}, the model wants {list(place.shape)}"
            )
        _fill(made, checkpoint, name, buffer)
        if attribute in module._buffers:
            module._buffers[attribute] = made
        else:
            setattr(module, attribute, nn.Parameter(made, requires_grad=place.requires_grad))


def _dtype_of(model: Any, module: str, dtype: torch.dtype) -> torch.dtype:
    """float32 where the stock class keeps it because float16 overflows (T5), else `dtype`."""
    kept = set(getattr(model, "_keep_in_fp32_modules", None) or ()) if dtype == torch.float16 else set()
    return torch.float32 if kept & set(module.split(".")) else dtype


def _fill(place: Tensor, checkpoint: Checkpoint, name: str, buffer: bytearray) -> None:
    """Read a tensor chunk by chunk into `place`, which may have another type or lie on another device."""
    info = checkpoint.info(name)
    if tuple(place.shape) != info.shape:
        raise CheckpointError(
            f"{checkpoint.path}: {name} has the shape {list(info.shape)}, the model wants {list(place.shape)}"
        )
    if info.dtype not in DTYPES:
        raise CheckpointError(
            f"{checkpoint.path}: {name} is of the type {info.dtype}, which no model runs in"
        )
    source = DTYPES[info.dtype]
    flat = place.detach().view(-1)
    for start in range(0, info.nbytes, CHUNK_BYTES):
        end = min(start + CHUNK_BYTES, info.nbytes)
        values = torch.frombuffer(checkpoint.read_range(name, start, end, buffer), dtype=source)
        flat[start // source.itemsize : end // source.itemsize].copy_(values)


def _tie(model: Any, checkpoint: Checkpoint, family: Architecture) -> None:
    """Give every alias that the checkpoint leaves out the parameter that it stands for."""
    aliases = ties(family, checkpoint.config, checkpoint.structure)
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
            model._init_weights(module)


def _require_complete(model: Any, checkpoint: Checkpoint) -> None:
    missing = [name for name, value in model.named_parameters() if value.is_meta]
    if missing:
        raise CheckpointError(
            f"{checkpoint.path}: {len(missing)} tensors are missing ({', '.join(missing[:3])}, …)",
            "config.json and the weights are not of one checkpoint; copy both again.",
        )
