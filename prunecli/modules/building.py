"""From an open checkpoint to a running model: its class without values, and every tensor read into its place.

`make_model` is where all that runs begins: in memory, layer by layer, and on several GPUs. Families that prunecli
builds by itself have their sparse FFNs replaced. Of those that run in their stock class, names are turned by
transformers' own rules for opening a checkpoint; of its conversions those alone are followed that stack experts, whose
parts are read one by one.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from prunecli.errors import UsageError
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.opening import result_config
from prunecli.model.patchwork import has_part, module_name
from prunecli.model.quantised import KEYS
from prunecli.model.skeleton import Skeleton, computed_parameters
from prunecli.model.sparse_layer import parts_of
from prunecli.model.structure import KEY
from prunecli.modules.classes import empty_model, fit_model, fitted_class, making, own_config, stock_class
from prunecli.modules.cpu_linear import speed_up_linears
from prunecli.modules.devices import dispatch, module_devices, spread
from prunecli.modules.filling import (
    Destination,
    Staging,
    fill,
    missing_tensors,
    read_spec,
    require_shape,
)
from prunecli.modules.int8 import linears_to_int8, put_int8, read_int8_experts
from prunecli.modules.saving import saving_as_stored, tie_parameters
from prunecli.modules.sparse_ffn import SparseFFN
from prunecli.modules.stages import EmptyModel, own_mixtures, stages_of, stock_mixtures
from prunecli.modules.stock_experts import use_own_experts
from prunecli.modules.stock_names import REMEDY, StockNames
from prunecli.private import float32_parts, init_weights, keep_value, model_from_config


def build_model(
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    name: str | None = None,
    memory: Mapping[int, int] | None = None,
) -> Any:
    """A model in evaluation mode, on `device`, its floating tensors in `dtype` (routers in float32).

    Every tensor is read chunk by chunk into its final place, so no second copy of the weights ever exists.

    Args:
        dtype: int8: linear layers and experts in it, one after another, all else in float32.
        name: of its class, one of the family's; None: see `stock_class`.
        memory: GPU -> bytes that its weights may take there; None: all are on `device`.

    Raises:
        UnsupportedModelError, CheckpointError: as `make_model`; or a tensor that cannot be read.
    """
    in_int8 = dtype == torch.int8
    made = make_model(checkpoint, device, torch.float32 if in_int8 else dtype, name, output=True)
    model = made.model
    placed = {} if memory is None else spread(model, memory) or {}
    where = module_devices(model, placed)
    if in_int8:
        read_int8_experts(model, checkpoint)
    staging = Staging()
    for held in () if in_int8 else made.mixtures:
        for attribute, stacked in zip(held.parts, held.stacked, strict=True):
            filled = torch.empty_like(stacked, device=where.get(id(held.module), device))
            setattr(held.module, attribute, nn.Parameter(filled, requires_grad=stacked.requires_grad))
        for number in range(held.layer.num_experts):  # every expert into its part of the stacked parameters
            for spec, stacked in zip(held.block(number), held.stacked, strict=True):
                read_spec(stacked.data[number], checkpoint, spec, staging)
    fill(made.targets, checkpoint, device, where, put_int8 if in_int8 else Destination.put)
    complete(made)
    if in_int8:
        linears_to_int8(model)
    if made.implementation:
        model.set_experts_implementation(made.implementation)
    dispatch(model, placed)
    if checkpoint.runs_stock:
        for key in KEYS:  # it is quantised no more, which its config would still say
            if hasattr(model.config, key):
                delattr(model.config, key)
        return model
    config = checkpoint.config
    if KEY in config:  # of the class that is saved, and as this version of prunecli writes it
        tensors = {*dict(parts_of(checkpoint.mixtures)), *(target.name for target in made.targets)}
        classes = None if name is None else (name,)
        config = result_config(checkpoint, checkpoint.structure, tensors=tensors, classes=classes)
    return saving_as_stored(model, checkpoint, config)


def make_model(
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    name: str | None = None,
    *,
    output: bool = False,
) -> EmptyModel:
    """The model without a single weight, in evaluation mode, its floating tensors to be in `dtype`.

    Args:
        device: where the model will run.
        dtype, name: as of `assemble`.
        output: of a model that runs in its stock class, whether its output layer will run.

    Raises:
        UnsupportedModelError: its class says nothing; or transformers does not let its experts be run from outside,
            or turns its tensors into others on opening.
        CheckpointError: a tensor is missing, unexpected or misshapen.
    """
    if checkpoint.family is None and (refused := refused_by_layer(checkpoint)) is not None:
        raise refused
    checkpoint.check()
    model = assemble(checkpoint, dtype, name)
    if device.type == "cpu":
        speed_up_linears(model)
    left_out, implementation = None, ""
    taken: set[str] = set()
    names = StockNames(checkpoint, model)
    if checkpoint.runs_stock:
        held = () if checkpoint.family is None else checkpoint.require_mixtures()
        taken |= dict(parts_of(layer for layer in held if layer.is_predicting)).keys()
        mixtures = stock_mixtures(checkpoint, names, [layer for layer in held if not layer.is_predicting])
        left_out = None if output else model.get_output_embeddings()
        implementation = use_own_experts(model) if mixtures else ""
    else:
        mixtures = own_mixtures(model, checkpoint)
    stages = stages_of(model, checkpoint, mixtures)
    for stage in stages:
        taken |= stage.mixture.names if stage.mixture is not None else set()
    rest = (name for name in checkpoint.tensors if name not in taken)
    owners = {}  # a module that several layers share, such as an FFN, belongs to none
    for number, stage in enumerate(stages):
        for module in stage.module.modules():
            owners[id(module)] = None if id(module) in owners else number
    targets = defaultdict(list)
    for target in _targets(checkpoint, names, rest, dtype, left_out):
        targets[owners.get(id(target.module))].append(target)
    made = EmptyModel(
        model.eval(),
        tuple(replace(stage, targets=tuple(targets[number])) for number, stage in enumerate(stages)),
        tuple(targets[None]),
        device,
        implementation,
    )
    _require_all(checkpoint, made, left_out)
    return made


def fill_resident(made: EmptyModel, checkpoint: Checkpoint) -> None:
    """Read what is held throughout where layers are read one after another, and complete the model.

    Raises:
        CheckpointError: a tensor cannot be read.
    """
    fill(made.resident, checkpoint, made.device)
    complete(made)


def assemble(checkpoint: Checkpoint, dtype: torch.dtype, name: str | None = None) -> Any:
    """The modules of the model that the checkpoint describes, their parameters on the meta device.

    Args:
        dtype: of its floating tensors.
        name: of its class; None: see `stock_class`, or `fitted_class` of what runs in its stock class.

    Raises:
        UnsupportedModelError: its class says nothing.
        CheckpointError: transformers refuses a value of config.json, or the family has no such class.
    """
    if checkpoint.runs_stock:
        model = empty_model(checkpoint, fitted_class(checkpoint, name), dtype=dtype)
        stored = checkpoint.tensors
        # T5 would tie what is apart.
        model.all_tied_weights_keys = {
            alias: name
            for alias, name in model.all_tied_weights_keys.items()
            if not (alias in stored and name in stored)
        }
        tie_parameters(model)
        return model
    layout, stock = checkpoint.layout, stock_class(checkpoint, name)
    family, sizes = layout.family, layout.sizes
    # Its sparse layers are about to be replaced, so they get few experts.
    few = max((layer.top_k for layer in checkpoint.mixtures), default=1)
    # Nor does the stored type matter, which transformers would look up.
    config = own_config(checkpoint, stock, num_experts=few, dtype=None, torch_dtype=None)
    with making(checkpoint):
        model = model_from_config(stock, config, dtype=dtype)
    model.config.num_experts = sizes.count("num_experts")
    names = partial(module_name, model)
    # Make anew the layers that the stock model takes for sparse, or for dense, by the numbers that they have now.
    for layer in layout.layers if layout.structure.of_kind("layer") else ():
        own: Any = model.get_submodule(names(layer.name))
        if getattr(own, "is_sparse", layer.ffn.is_sparse) != layer.ffn.is_sparse:
            with torch.device("meta"):
                remade = type(own)(model.config, is_sparse=layer.ffn.is_sparse, layer_idx=layer.number)
            model.set_submodule(names(layer.name), remade.to(dtype))
    for mixture in checkpoint.mixtures:  # each with its own number of experts
        stack = next(stack for stack in family.stacks if stack.side == mixture.side)
        with torch.device("meta"):
            module = SparseFFN(
                sizes.count("d_model"),
                sizes.count(stack.ffn.width),
                mixture.num_experts,
                top_k=mixture.top_k,
                activation=str(sizes.value("activation_function")),
                router_bias=any(tensor.endswith(".bias") for tensor in mixture.router_tensors),
                token_dropout=float(sizes.value("moe_token_dropout")),
                activation_dropout=float(model.config.activation_dropout),
            )
        model.set_submodule(names(mixture.name), module.to(dtype))
    dense = {"encoder_sparse_step": 0, "decoder_sparse_step": 0}
    skeleton = Skeleton(type(model), type(model.config), {**model.config.to_dict(), **dense})
    fit_model(model, checkpoint, layout, skeleton, names)
    tie_parameters(model)
    return model


def complete(made: EmptyModel) -> None:
    """Tie what is tied, and compute what a model computes at its making and does not store: positions, for one."""
    tie_parameters(made.model)
    read = {(id(target.module), target.attribute) for target in made.targets}
    models: dict[str, Any] = {}
    endings = computed_parameters(made.model)
    for path, module in made.model.named_modules():
        # The rule is of the innermost model, as transformers applies it: ModernVBERT's text model has its own.
        models[path] = module if isinstance(module, PreTrainedModel) else models[path.rpartition(".")[0]]
        own = module.named_parameters(recurse=False)
        parameters = ((name, value) for name, value in own if f"{path}.{name}".endswith(endings))
        computed = {
            name: value
            for name, value in (*module.named_buffers(recurse=False), *parameters)
            if value.is_meta and (id(module), name) not in read
        }
        for name, value in computed.items():
            values = torch.empty_like(value, device=made.device)
            if isinstance(value, nn.Parameter):
                setattr(module, name, nn.Parameter(values, requires_grad=value.requires_grad))
            else:
                module.register_buffer(name, values, persistent=False)
        if computed:
            for name, parameter in module.named_parameters():
                if name not in computed:  # was read: transformers must neither draw nor compute it
                    keep_value(parameter)
            init_weights(models[path], module)


def _targets(
    checkpoint: Checkpoint,
    names: StockNames,
    stored: Iterable[str],
    dtype: torch.dtype,
    left_out: nn.Module | None,
) -> Iterator[Destination]:
    """Destinations of tensors of the checkpoint, without those of a module that is left out."""
    model = names.model
    # The parameters that the class has in float32 whatever it is opened in; as transformers does, anywhere in a name.
    parts = float32_parts(model, dtype)
    wide = re.compile("|".join(part.replace("*", ".*") for part in sorted(parts))) if parts else None
    for name in stored:
        own = names.place(name)
        if not has_part(model, own):  # what the class does not run, as layers that predict further tokens
            continue
        owner, _, attribute = own.rpartition(".")
        module = model.get_submodule(owner)
        if module is left_out:
            continue
        tensor = getattr(module, attribute)
        require_shape(tensor, checkpoint, name)
        # Of the type in which the class makes it: `dtype`, but for a router or so that it always has in float32.
        is_wide = tensor.is_floating_point() and wide is not None and wide.search(own) is not None
        yield Destination(name, module, attribute, torch.float32 if is_wide else tensor.dtype)


def _require_all(checkpoint: Checkpoint, made: EmptyModel, left_out: nn.Module | None) -> None:
    """Refuse a checkpoint that leaves a parameter, or a buffer that is stored, without values.

    Raises:
        CheckpointError: it does.
    """
    held = {id(target.tensor) for target in made.targets}
    held |= {id(tensor) for one in made.mixtures for tensor in one.stacked}
    held |= {id(tensor) for tensor in (() if left_out is None else left_out.parameters())}
    endings = computed_parameters(made.model)
    needed = [one for one in made.model.named_parameters() if not one[0].endswith(endings)]
    if checkpoint.runs_stock:
        stored = {*made.model.state_dict()}
        needed += [(name, buffer) for name, buffer in made.model.named_buffers() if name in stored]
    if missing := [name for name, tensor in needed if id(tensor) not in held]:
        raise missing_tensors(checkpoint, missing)


def refused_by_layer(checkpoint: Checkpoint) -> UsageError | None:
    """Why a model that runs in its stock class is not run layer by layer, as an error; None: it is.

    Raises:
        UnsupportedModelError: its class says nothing of its layers.
        CheckpointError: config.json names no type.
    """
    reason = f"a model of type {checkpoint.model_type} is measured with the whole model in memory"
    if checkpoint.has_constants:
        reason = f"in {checkpoint.path} constants stand for experts: it is run with the whole model in memory"
    else:
        if checkpoint.family is None:
            checkpoint.require_architecture()
        if checkpoint.runs_by_layer:
            return None
    return UsageError(f"`memory`: {reason}", REMEDY)
