"""What is set in a model before it is trained: which parameters learn, its dropouts, what it keeps for the way back."""

from __future__ import annotations

import warnings
from math import prod
from typing import Any

import torch
from torch import nn

from prunecli.errors import PruneError, UsageError
from prunecli.model.layout import ModelLayout
from prunecli.modules.attention import module_name
from prunecli.training.options import TrainedPart, TrainingOptions

PARTS = {"routers": "router", "embeddings": "embeddings"}
"""Values of --train -> the part of a layout."""

APART = ("token_dropout", "layerdrop")
"""Endings of the rates that are no dropout of hidden states: whole outputs of experts, whole layers."""


def prepare(model: Any, layout: ModelLayout, options: TrainingOptions) -> None:
    """Set the model's dropouts, which of its parameters learn, and whether activations are kept.

    Raises:
        UsageError: the model has no such part, or always keeps its activations.
        PruneError: low-rank updates are asked for, and peft is not installed.
    """
    if options.dropout is not None:
        _set_dropouts(model, options.dropout)
    if options.train != "all":
        _freeze_others(model, layout, options.train)
    if options.lora is not None:
        _adapt(model, layout, options.lora, options.seed)
    if options.gradient_checkpointing:
        if not model.supports_gradient_checkpointing:
            raise UsageError(f"--gradient-checkpointing: {type(model).__name__} cannot", "Leave it out.")
        # Its name until transformers 5.23, which warns of it.
        older = model.gradient_checkpointing_enable
        getattr(model, "activation_checkpointing_enable", older)({"use_reentrant": False})


def trained_parameters(layout: ModelLayout, options: TrainingOptions) -> int:
    """How many parameters learn, by names and shapes alone."""
    if options.lora is not None:
        return sum(options.lora * sum(layout.shapes[name]) for name in _matrices(layout))
    return sum(
        prod(shape)
        for shape, part in layout.tensors.values()
        if options.train == "all" or part == PARTS[options.train]
    )


def _set_dropouts(model: nn.Module, rate: float) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = rate
        for name, value in vars(module).items():
            if isinstance(value, float) and "dropout" in name and not name.endswith(APART):
                setattr(module, name, rate)


def _freeze_others(model: nn.Module, layout: ModelLayout, train: TrainedPart) -> None:
    part = PARTS[train]
    # A mixture of experts holds its router without the stock module around it.
    names = {
        module_name(model, name).replace(".router.classifier.", ".router.")
        for name, (_, kind) in layout.tensors.items()
        if kind == part
    }
    learns = [name for name, _ in model.named_parameters() if name in names]
    if not learns:
        raise UsageError(f"--train {train}: the model has none", "Leave it out.")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in names)


def require_peft() -> None:
    """Refuse before the work what cannot be trained without peft.

    Raises:
        PruneError: it is not installed, or does not go with this version of transformers.
    """
    try:
        import peft  # noqa: F401
    except ImportError as error:
        is_absent = isinstance(error, ModuleNotFoundError) and error.name == "peft"
        why = "which is not installed" if is_absent else f"which cannot be imported ({error})"
        raise PruneError(
            f"--lora needs peft, {why}.", "Install it: pip install --upgrade 'peft>=0.18'."
        ) from error


def _matrices(layout: ModelLayout) -> list[str]:
    """Weights of the linear layers of attentions and FFNs; experts lie in stacks and are none."""
    return [
        name
        for name, (shape, part) in layout.tensors.items()
        if part in ("attention", "ffn") and len(shape) == 2
    ]


def _adapt(model: nn.Module, layout: ModelLayout, rank: int, seed: int) -> None:
    """Give each linear layer of attentions and FFNs an update of this rank, which learns alone (arXiv 2106.09685).

    The update counts twice (alpha = 2 r), as is usual. A layer that several FFNs share has one.
    """
    require_peft()
    import peft
    from transformers.pytorch_utils import Conv1D

    modules = dict(model.named_modules(remove_duplicate=False))
    named = {module_name(model, name).rpartition(".")[0] for name in _matrices(layout)}
    targets = sorted(name for name in named if isinstance(modules.get(name), nn.Linear | Conv1D))
    if not targets:
        raise UsageError("--lora: the model has no linear layers of attentions or FFNs", "Leave it out.")
    originals = {name: modules[name] for name in targets}
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of GPT-2's transposed layers, which it sets right
        torch.manual_seed(seed)
        peft.inject_adapter_in_model(config, model)
    adapted = {id(original): model.get_submodule(name) for name, original in originals.items()}
    for name, module in modules.items():  # the other names of a shared layer
        if id(module) in adapted and model.get_submodule(name) is module:
            model.set_submodule(name, adapted[id(module)])


def merged_state(model: nn.Module) -> dict[str, Any]:
    """The model's state dict, updates of low rank added to what they update; nothing in the model changes."""
    state = model.state_dict()
    for name, module in model.named_modules(remove_duplicate=False):
        if f"{name}.base_layer.weight" not in state:
            continue
        update: Any = module
        weight = state.pop(f"{name}.base_layer.weight")
        state[f"{name}.weight"] = weight + update.get_delta_weight("default").to(weight)
        if f"{name}.base_layer.bias" in state:
            state[f"{name}.bias"] = state.pop(f"{name}.base_layer.bias")
    return {name: value for name, value in state.items() if ".lora_" not in name}
