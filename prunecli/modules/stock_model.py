"""Models that run in their stock class, made without weights: where each stored tensor belongs.

Names are turned by transformers' own rules for opening a checkpoint. Of its conversions those alone are followed that
stack experts, whose parts are read one by one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from prunecli.architectures.mixtures import BY_LAYER
from prunecli.architectures.records import Side
from prunecli.errors import UnsupportedModelError
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.probe import layer_keys
from prunecli.model.quantisation import KEYS
from prunecli.model.sparse_layer import SparseLayer
from prunecli.modules.building import missing_tensors, on_each
from prunecli.modules.devices import dispatch, module_devices, spread
from prunecli.modules.filling import Destination, chunk_for, expert_names, fill, read_into, require_shape
from prunecli.modules.saving import tie_parameter
from prunecli.modules.stock_classes import empty_model, fitted_class
from prunecli.modules.stock_experts import expert_modules, part_names, use_own_experts
from prunecli.modules.stock_names import REMEDY, StockNames, has_tensor
from prunecli.private import computed_buffers, float32_parts, init_weights


@dataclass(frozen=True)
class ExpertPart:
    """One of a module's stacked parameters, and what an expert's entry of it is read from.

    Attributes:
        attribute: of the module of experts.
        sources: names in the checkpoint whose rows, one after another, make up the entry, "{expert}" for its number;
            or the one that holds all experts.
        is_stacked: whether that is so.
    """

    attribute: str
    sources: tuple[str, ...]
    is_stacked: bool


@dataclass(frozen=True)
class StockExperts:
    """The experts of a layer, which are read one at a time.

    Attributes:
        layer: as the checkpoint has it.
        module: of the stock class, on the meta device.
        parts: as `ExpertWeights` has them.
    """

    layer: SparseLayer
    module: Any
    parts: tuple[ExpertPart, ...]


@dataclass(frozen=True)
class StockModel:
    """A model on the meta device, and where its tensors belong.

    Attributes:
        model: of the stock class, in evaluation mode, its experts run by `run_mixture`.
        layers: stack, name as in the checkpoint and module of each layer, in the order in which they run.
        experts: module's name of a mixture -> its experts.
        targets: of each other tensor, by the name of its module; of the output layer where that was asked for.
        implementation: what transformers would have its experts run by.
    """

    model: Any
    layers: tuple[tuple[Side, str, nn.Module], ...]
    experts: dict[str, StockExperts]
    targets: tuple[tuple[str, Destination], ...]
    implementation: str


def refused_by_layer(checkpoint: Checkpoint) -> str | None:
    """Why a model that runs in its stock class is not run layer by layer; None: it is.

    Raises:
        UnsupportedModelError: its class says nothing of its layers.
        CheckpointError: config.json names no type.
    """
    if checkpoint.has_constants:
        return f"in {checkpoint.path} constants stand for experts: it is run with the whole model in memory"
    if checkpoint.family is None:
        checkpoint.require_architecture()
        trial = checkpoint.probed.trial
        is_run = trial.runs_by_layer(layer_keys(trial.skeleton))
    else:
        is_run = checkpoint.model_type in BY_LAYER
    if not is_run:
        return f"a model of type {checkpoint.model_type} is measured with the whole model in memory"
    return None


def make_stock_model(checkpoint: Checkpoint, dtype: torch.dtype, *, output: bool = False) -> StockModel:
    """The model without a single weight, its floating tensors to be in `dtype`.

    Args:
        output: whether its output layer will run.

    Raises:
        UnsupportedModelError: transformers does not let its experts be run from outside, or turns its tensors into
            others on opening.
        CheckpointError: a tensor is missing, unexpected or misshapen.
    """
    checkpoint.check()
    model = empty_model(checkpoint, fitted_class(checkpoint), dtype=dtype)
    names = StockNames(checkpoint, model)
    held = () if checkpoint.family is None else checkpoint.require_mixtures()
    mixtures = [layer for layer in held if not layer.is_predicting]
    taken = expert_names(layer for layer in held if layer.is_predicting)
    experts = _experts(checkpoint, names, mixtures, expert_modules(model))
    taken |= {name for own in experts.values() for name in _names_of(own)}
    rest = [name for name in checkpoint.tensors if name not in taken]
    targets = tuple(_targets(checkpoint, names, rest, dtype, output=output))
    layers = _layers_of_experts(model, experts) if experts else _found_layers(model, checkpoint)
    implementation = use_own_experts(model) if experts else ""
    _require_all(checkpoint, model, experts, targets, output=output)
    return StockModel(model.eval(), layers, experts, targets, implementation)


def _layers_of_experts(
    model: Any, experts: Mapping[str, StockExperts]
) -> tuple[tuple[Side, str, nn.Module], ...]:
    stacks = {re.sub(r"\.\d+\..*", "", path) for path in experts}
    if len(stacks) != 1:
        raise UnsupportedModelError(f"{type(model).__name__} has several stacks of experts", REMEDY)
    stack = stacks.pop()
    children = model.get_submodule(stack).named_children()
    return tuple(("decoder", f"{stack}.{name}", module) for name, module in children)


def _found_layers(model: Any, checkpoint: Checkpoint) -> tuple[tuple[Side, str, nn.Module], ...]:
    layout = checkpoint.layout
    modules = {stack.key: stack.modules[0] for stack in layout.family.found.layers}
    return tuple(
        (stack.side, name, model.get_submodule(modules[stack.depth])[number])
        for stack in layout.family.stacks
        for number, name in layout.sizes.layers(stack)
    )


def load_stock_model(
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    memory: Mapping[int, int] | None = None,
) -> Any:
    """Load a stock model tensor by tensor, for checkpoints that transformers cannot read.

    Args:
        memory: GPU -> bytes that its weights may take there; None: all are on `device`.

    Returns:
        The model, its experts run as transformers runs them.

    Raises:
        UnsupportedModelError, CheckpointError: as `make_stock_model`; or a tensor that cannot be read.
    """
    made = make_stock_model(checkpoint, dtype, output=True)
    placed = {} if memory is None else spread(made.model, memory) or {}
    where = module_devices(made.model, placed)
    for place, together in on_each((target for _, target in made.targets), device, where).items():
        fill(together, checkpoint, place)
    for held in made.experts.values():
        staging = chunk_for(checkpoint, _names_of(held))
        for part in held.parts:
            stacked = getattr(held.module, part.attribute)
            place = where.get(id(held.module), device)
            filled = torch.empty(stacked.shape, dtype=stacked.dtype, device=place)
            for number, entry in enumerate(filled):
                if part.is_stacked:
                    read_into(entry, checkpoint, part.sources[0], staging, number)
                    continue
                start = 0
                for name in (source.format(expert=number) for source in part.sources):
                    rows = checkpoint.info(name).shape[0]
                    read_into(entry[start : start + rows], checkpoint, name, staging)
                    start += rows
            setattr(held.module, part.attribute, nn.Parameter(filled, requires_grad=stacked.requires_grad))
    tie(made.model)
    compute_buffers(made.model, device)
    if made.experts:
        made.model.set_experts_implementation(made.implementation)
    for key in KEYS:  # it is quantised no more, which its config would still say
        if hasattr(made.model.config, key):
            delattr(made.model.config, key)
    dispatch(made.model, placed)
    return made.model


def tie(model: Any) -> None:
    """Have each parameter that the class ties be the one that was read."""
    for alias, name in model.all_tied_weights_keys.items():
        if not model.get_parameter(name).is_meta:
            tie_parameter(model, alias, name)


def compute_buffers(model: Any, device: torch.device) -> None:
    """Compute what a model computes at its making and does not store: positions."""
    for module in model.modules():
        absent = {name: buffer for name, buffer in computed_buffers(module).items() if buffer.is_meta}
        for name, buffer in absent.items():
            setattr(module, name, torch.empty_like(buffer, device=device))
        if absent:
            init_weights(model, module)


def _experts(
    checkpoint: Checkpoint, names: StockNames, mixtures: Sequence[SparseLayer], modules: dict[str, Any]
) -> dict[str, StockExperts]:
    if [module.num_experts for module in modules.values()] != [layer.num_experts for layer in mixtures]:
        raise UnsupportedModelError(
            f"{checkpoint.path}: {type(names.model).__name__} has {len(modules)} layers of experts that can be run "
            f"from outside, the checkpoint holds {len(mixtures)}",
            REMEDY,
        )
    found = {}
    for layer, (path, module) in zip(mixtures, modules.items(), strict=True):
        sources: dict[str, dict[int, str]] = {}
        for suffix in layer.expert_tensors:
            name = layer.expert_tensor(0, suffix)
            place = names.stacked(name)
            if place is None:
                raise names.refusal(name)
            sources.setdefault(place[0], {})[place[1]] = f"{layer.expert_prefix}.{suffix}"
        parts = []
        for attribute in part_names(module):
            target = f"{path}.{attribute}"
            if own := sources.pop(target, None):
                parts.append(ExpertPart(attribute, tuple(own[place] for place in sorted(own)), False))
                continue
            stacked = [name for name in layer.stacked_tensors if names.place(name) == target]
            if len(stacked) != 1:
                raise missing_tensors(checkpoint, [target])
            require_shape(getattr(module, attribute), checkpoint, stacked[0])
            parts.append(ExpertPart(attribute, (stacked[0],), True))
        known = {source for part in parts for source in part.sources}
        if odd := [*sources, *(name for name in layer.stacked_tensors if name not in known)]:
            raise names.refusal(odd[0])
        found[path] = StockExperts(layer, module, tuple(parts))
    return found


def _names_of(held: StockExperts) -> Iterator[str]:
    for part in held.parts:
        for source in part.sources:
            if part.is_stacked:
                yield source
            else:
                yield from (source.format(expert=number) for number in range(held.layer.num_experts))


def _targets(
    checkpoint: Checkpoint, names: StockNames, stored: Iterable[str], dtype: torch.dtype, *, output: bool
) -> Iterator[tuple[str, Destination]]:
    left_out = None if output else names.model.get_output_embeddings()
    # The parameters that the class has in float32 whatever it is opened in; as transformers does, anywhere in a name.
    parts = float32_parts(names.model, dtype)
    wide = re.compile("|".join(part.replace("*", ".*") for part in sorted(parts))) if parts else None
    for name in stored:
        place = names.place(name)
        if not has_tensor(names.model, place):
            continue  # what the class does not run, as layers that predict further tokens
        owner, _, attribute = place.rpartition(".")
        module = names.model.get_submodule(owner)
        if module is left_out:
            continue
        tensor = getattr(module, attribute)
        require_shape(tensor, checkpoint, name)
        # Of the type in which the class makes it: `dtype`, but for a router or so that it always has in float32.
        is_wide = tensor.is_floating_point() and wide is not None and wide.search(place) is not None
        kind = torch.float32 if is_wide else tensor.dtype
        yield place, Destination(name, module, attribute, kind)


def _require_all(
    checkpoint: Checkpoint,
    model: Any,
    experts: dict[str, StockExperts],
    targets: Sequence[tuple[str, Destination]],
    *,
    output: bool,
) -> None:
    """Refuse a checkpoint that leaves a parameter, or a buffer that is stored, without values."""
    held = {id(target.tensor) for _, target in targets}
    held |= {id(getattr(one.module, part.attribute)) for one in experts.values() for part in one.parts}
    head = model.get_output_embeddings()
    if head is not None and not output:
        held |= {id(tensor) for tensor in head.parameters()}
    stored = {*model.state_dict()}
    missing = [
        name
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
        if name in stored and id(tensor) not in held
    ]
    if missing:
        raise missing_tensors(checkpoint, missing)
