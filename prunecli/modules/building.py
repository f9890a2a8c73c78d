"""From an open checkpoint to a running model: the stock class, its sparse FFNs replaced, its tensors read in place."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from prunecli.architectures.records import Architecture
from prunecli.errors import CheckpointError, reason_of
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.declared import class_names
from prunecli.model.opening import auto_classes, readable, result_config
from prunecli.model.patchwork import fit_layers, module_name
from prunecli.model.skeleton import Skeleton, cannot_make
from prunecli.model.structure import KEY, WEIGHTS_KEY
from prunecli.modules.cpu_linear import speed_up_linears
from prunecli.modules.define import fit_embeddings, has_module
from prunecli.modules.devices import dispatch, module_devices, spread
from prunecli.modules.filling import Destination, chunk_for, destinations, expert_names, fill, read_into
from prunecli.modules.int8 import fill_int8, linears_to_int8, read_int8_experts
from prunecli.modules.saving import saving_as_stored, tie_parameter
from prunecli.modules.sparse_ffn import EXPERT_PARTS, SparseFFN
from prunecli.private import init_weights, keep_value


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
        name: of its class, one of the family's; None: see `model_class`.
        memory: GPU -> bytes that its weights may take there; None: all are on `device`.

    Raises:
        UnsupportedModelError: the family is not declared.
        CheckpointError: a tensor is missing, unexpected or misshapen, or the family has no such class.
    """
    in_int8 = dtype == torch.int8
    computed = torch.float32 if in_int8 else dtype
    model = assemble(checkpoint, device, computed, name)
    tie(model, checkpoint)
    placed = {} if memory is None else spread(model, memory) or {}
    where = module_devices(model, placed)
    experts = expert_names(checkpoint.mixtures)
    if in_int8:
        read_int8_experts(model, checkpoint)
    else:  # every expert into its part of the stacked parameters
        staging = chunk_for(checkpoint, experts)
        for mixture in checkpoint.mixtures:
            module = model.get_submodule(module_name(model, mixture.name))
            for part, suffix in EXPERT_PARTS.items():
                stacked = torch.empty_like(getattr(module, part), device=where.get(id(module), device))
                setattr(module, part, nn.Parameter(stacked))
                for expert in range(mixture.num_experts):
                    read_into(stacked[expert], checkpoint, mixture.expert_tensor(expert, suffix), staging)
    others = [name for name in checkpoint.tensors if name not in experts]
    targets = list(destinations(model, checkpoint, others, computed))
    left = fill_int8(targets, checkpoint) if in_int8 else targets
    for place, together in on_each(left, device, where).items():
        fill(together, checkpoint, place)
    complete(model, checkpoint, device)
    if in_int8:
        linears_to_int8(model)
    dispatch(model, placed)
    config = checkpoint.config
    if KEY in config:  # of the class that is saved, and as this version of prunecli writes it
        tensors = experts | {target.name for target in targets}
        classes = None if name is None else (name,)
        config = result_config(checkpoint, checkpoint.structure, tensors=tensors, classes=classes)
    return saving_as_stored(model, checkpoint, config).eval()


def assemble(
    checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, name: str | None = None
) -> Any:
    """The modules of the model that the checkpoint describes, their parameters on the meta device.

    Args:
        checkpoint: of a declared family that prunecli builds.
        device: where the model will run.
        dtype: of its floating tensors.
        name: of its class; None: see `model_class`.

    Raises:
        UnsupportedModelError: the family is not declared.
        CheckpointError: a tensor is missing, unexpected or misshapen, or the family has no such class.
    """
    checkpoint.require_built()
    checkpoint.check()
    layout = checkpoint.layout
    model = _stock_model(checkpoint, dtype, name)
    if layout.tables is not None:
        fit_embeddings(model, layout.tables, dtype, partial(module_name, model))
    # Make anew the layers that the stock model takes for sparse, or for dense, by the numbers that they have now.
    for layer in layout.layers if layout.structure.of_kind("layer") else ():
        stock = model.get_submodule(module_name(model, layer.name))
        if getattr(stock, "is_sparse", layer.ffn.is_sparse) != layer.ffn.is_sparse:
            with torch.device("meta"):
                made = type(stock)(model.config, is_sparse=layer.ffn.is_sparse, layer_idx=layer.number)
            model.set_submodule(module_name(model, layer.name), made.to(next(stock.parameters()).dtype))
    sizes, family = layout.sizes, layout.family
    for mixture in checkpoint.mixtures:  # each with its own number of experts
        stack = next(stack for stack in family.stacks if stack.side == mixture.side)
        module = SparseFFN(
            int(sizes.value("d_model")),
            int(sizes.value(stack.ffn.width)),
            mixture.num_experts,
            top_k=mixture.top_k,
            activation=str(sizes.value("activation_function")),
            router_bias=any(tensor.endswith(".bias") for tensor in mixture.router_tensors),
            token_dropout=float(sizes.value(family.token_dropout)) if family.token_dropout else 0.0,
            activation_dropout=float(getattr(model.config, "activation_dropout", 0.0)),
            device="meta",
            dtype=dtype,
        )
        model.set_submodule(module_name(model, mixture.name), module)
    if not checkpoint.structure.is_stock:
        dense = {stack.ffn.sparse_step: 0 for stack in family.stacks if stack.ffn.sparse_step}
        skeleton = Skeleton(type(model), type(model.config), {**model.config.to_dict(), **dense})
        fit_layers(model, layout, skeleton, partial(module_name, model))
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
    tie(model, checkpoint)
    _fill_buffers(model, checkpoint.layout.family, device)
    missing = [name for name, value in model.named_parameters() if value.is_meta and id(value) not in absent]
    if missing:
        raise missing_tensors(checkpoint, missing)


def tie(model: Any, checkpoint: Checkpoint) -> None:
    """Make each tied parameter the same `Parameter` as the one that the checkpoint stores."""
    # T5 would tie what is apart, as every family would where the output layer no longer has the input's table.
    if checkpoint.structure.embedding.is_stock and not any(
        alias in checkpoint.tensors for alias in checkpoint.layout.family.tied
    ):
        model.tie_weights()  # the aliases of task heads too
    for own, name in checkpoint.layout.ties.items():
        alias = module_name(model, own)
        if own not in checkpoint.tensors and has_module(model, alias.rpartition(".")[0]):
            tie_parameter(model, alias, module_name(model, name))


def model_class(checkpoint: Checkpoint, name: str | None = None) -> Any:
    """The class of transformers that config.json names, where it is one of the family's; else the declared one.

    Where prunecli runs the experts it is the declared one, whatever config.json names: what is done is to translate.

    Args:
        name: of the class that is asked for instead.

    Raises:
        CheckpointError: the family has no class of that name.
    """
    import transformers

    family = checkpoint.require_architecture()
    names = class_names(checkpoint.config) if family.mixture is None or family.must_be_stock else ()
    for candidate in (name,) if name is not None else names:
        known = getattr(transformers, candidate, None)
        if getattr(getattr(known, "config_class", None), "model_type", None) == family.model_type:
            return known
    if name is not None:
        classes = ", ".join(known.name for known in family.classes) or family.model_class
        raise CheckpointError(f"{checkpoint.path}: no {name} can be made of it", f"Choose one of {classes}.")
    own = family.model_class
    if not class_names(
        checkpoint.config
    ):  # the family's own, else another head that the tensors are of, else none
        able = [*auto_classes(family, readable(checkpoint.resolved, checkpoint.tensors), ()).values()]
        own = own if own in able else able[len(able) > 1]
    return getattr(transformers, own)


def missing_tensors(checkpoint: Checkpoint, names: Sequence[str]) -> CheckpointError:
    """Return the error about tensors that a model needs and the checkpoint lacks."""
    few = ", ".join((*names[:3], "…") if len(names) > 3 else names)
    what = f"{len(names)} tensors are missing ({few})" if len(names) > 1 else f"a tensor is missing ({few})"
    tied = {} if checkpoint.architecture is None else checkpoint.architecture.tied
    remedy = "config.json and the weights are not of one checkpoint; copy both again."
    if all(tied.get(name) in checkpoint.tensors for name in names):
        same = ", ".join(f"{tied[name]} as {name}" for name in names)
        remedy = f"transformers before version 5 left out what was one parameter for it: store {same} too."
    return CheckpointError(f"{checkpoint.path}: {what}", remedy)


def stock_config(checkpoint: Checkpoint, **changes: Any) -> Any:
    """The configuration object of the family's stock class, with `changes` to config.json's values.

    Raises:
        CheckpointError: transformers refuses a value, or a dropout is no probability, which it would refuse at work.
    """
    from transformers import CONFIG_MAPPING

    family = checkpoint.require_architecture()
    left_out = (KEY, "auto_map", WEIGHTS_KEY)
    values = {key: value for key, value in checkpoint.config.items() if key not in left_out}
    if names := class_names(checkpoint.config):
        values["architectures"] = list(names)
    values |= {"model_type": family.model_type, **changes}
    for key, value in values.items():
        if "drop" in key and isinstance(value, (int, float)) and not 0 <= value <= 1:
            raise CheckpointError(
                f"{checkpoint.path}/config.json: {key} is {value}, which is no probability",
                "Correct the value, or copy the file again.",
            )
    try:
        return CONFIG_MAPPING[family.model_type].from_dict(values)
    except Exception as error:  # whatever a value of the wrong kind runs into inside of transformers
        raise CheckpointError(
            f"{checkpoint.path}/config.json: transformers refuses a value ({reason_of(error)})",
            "Correct the value, or copy the file again.",
        ) from error


@contextmanager
def making(checkpoint: Checkpoint) -> Iterator[None]:
    """Inside, models of transformers' classes are made on the meta device, without values.

    Raises:
        CheckpointError: transformers refuses a value of config.json.
    """
    try:
        with torch.device("meta"), NoValues():
            yield
    except CheckpointError:
        raise
    except Exception as error:  # whatever a value of the wrong kind runs into inside of transformers
        raise cannot_make(f"{checkpoint.path}/config.json", error) from error


class NoValues(TorchFunctionMode):
    """On the meta device there is nothing to draw; torch would work it out for each parameter all the same."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init" and options["tensor"].is_meta:
            return options["tensor"]
        return func(*args, **options)


def _stock_model(checkpoint: Checkpoint, dtype: torch.dtype, name: str | None) -> Any:
    """The stock class on the meta device. Its sparse layers are about to be replaced, so they get few experts."""
    family = checkpoint.layout.family
    # Nor does the stored type matter, which transformers would look up.
    counts = family.mixture.counts if family.mixture else ()
    few = max((layer.top_k for layer in checkpoint.mixtures), default=1)
    changes = {**dict.fromkeys(counts, few), "dtype": None, "torch_dtype": None}
    stock = model_class(checkpoint, name)
    is_base = bool(family.classes) and stock.__name__ == family.classes[0].name
    has_pooler = family.pooler is None or any(name.startswith(family.pooler) for name in checkpoint.tensors)
    options = {"add_pooling_layer": False} if is_base and not has_pooler else {}  # no other class knows it
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # as from_pretrained does: buffers take the type of the model
    try:
        with making(checkpoint):
            model = stock(stock_config(checkpoint, **changes), **options)
    finally:
        torch.set_default_dtype(previous)
    for key in counts:
        setattr(model.config, key, checkpoint.layout.sizes.count(key))
    return model


def on_each(
    targets: Iterable[Destination], device: torch.device, where: Mapping[int, torch.device]
) -> dict[torch.device, list[Destination]]:
    """Device -> what belongs there: by the id of the module, else to `device`."""
    found: dict[torch.device, list[Destination]] = {device: []}
    for target in targets:
        found.setdefault(where.get(id(target.module), device), []).append(target)
    return found


def _fill_buffers(model: Any, family: Architecture, device: torch.device) -> None:
    """Compute what the model computes at its making and does not store: positions, for one; a parameter in Marian."""
    for path, module in model.named_modules():
        buffers = {name: value for name, value in module.named_buffers(recurse=False) if value.is_meta}
        for name, value in buffers.items():
            module.register_buffer(name, torch.empty_like(value, device=device), persistent=False)
        computed = {
            name: value
            for name, value in module.named_parameters(recurse=False)
            if value.is_meta and f"{path}.{name}".endswith(family.buffers)
        }
        for name, value in computed.items():
            parameter = nn.Parameter(
                torch.empty_like(value, device=device), requires_grad=value.requires_grad
            )
            setattr(module, name, parameter)
        if buffers or computed:
            for name, value in module.named_parameters():
                if name not in computed:  # was read: transformers must neither draw nor compute it
                    keep_value(value)
            init_weights(model, module)
