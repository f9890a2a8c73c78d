"""Before training: which parameters learn, and dropouts. After it: the checkpoint's own tensors, for the pipeline."""

import warnings
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from prunecli.errors import UsageError
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.conversion import PEFT, require_package
from prunecli.model.patchwork import module_name
from prunecli.model.skeleton import stored_form
from prunecli.model.small_model import is_linear
from prunecli.modules.fitting import COMPUTE
from prunecli.modules.saving import stock_names
from prunecli.modules.stock_experts import expert_modules, part_names
from prunecli.modules.stock_names import StockNames
from prunecli.results.document import Json
from prunecli.tensors.stream import Copy, Expression, Generated, Output
from prunecli.training.options import TrainedPart, TrainingOptions

APART = ("token_dropout", "layerdrop")
"""Endings of the rates that are no dropout of hidden states: whole outputs of experts, whole layers."""


def prepare(model: Any, checkpoint: Checkpoint, options: TrainingOptions) -> None:
    """Set the model's dropouts, which of its parameters learn, and whether activations are kept.

    Args:
        model: loaded of `checkpoint`.

    Raises:
        UsageError: the model has no such part, or always keeps its activations.
        PruneError: low-rank updates are asked for, and peft is not installed.
    """
    if options.dropout is not None:
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = options.dropout
            for name, value in vars(module).items():
                if isinstance(value, float) and "drop" in name and not name.endswith(APART):
                    setattr(module, name, options.dropout)
    if options.lora is not None:
        _adapt(model, checkpoint, options)
    elif options.train != "all":
        names = _part(model, checkpoint, options.train)
        if not any(name in names for name, _ in model.named_parameters()):
            raise UsageError(f"`train={options.train}`: the model has none", "Leave it out.")
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in names)
    if options.gradient_checkpointing:
        if not model.supports_gradient_checkpointing:
            raise UsageError(f"`gradient_checkpointing`: {type(model).__name__} cannot", "Leave it out.")
        # Its name until transformers 5.23, which warns of it.
        older = model.gradient_checkpointing_enable
        getattr(model, "activation_checkpointing_enable", older)({"use_reentrant": False})


def _part(model: Any, checkpoint: Checkpoint, train: TrainedPart) -> set[str]:
    """The model's names of the parameters that a value of `train` chooses, and others that it has no parameter of."""
    if train == "embeddings":
        tables = {
            id(parameter)
            for table in _tables(model)
            for name, parameter in table.named_parameters()
            if name != "bias"
        }
        return {name for name, one in model.named_parameters(remove_duplicate=False) if id(one) in tables}
    names = StockNames(checkpoint, model)
    layers = [layer for layer in checkpoint.mixtures if not layer.is_predicting]
    if train == "routers":
        return {names.parameter(name) for layer in layers for name in layer.router_tensors}
    return {name for layer in layers for name in names.of_experts(layer)}


def _tables(model: Any) -> list[nn.Module]:
    tables = (model.get_input_embeddings(), model.get_output_embeddings())
    return [table for table in tables if table is not None]


def _linears(model: nn.Module, checkpoint: Checkpoint) -> list[str]:
    """The model's names of its linear layers of attentions and FFNs; routers and experts are none."""
    modules = dict(model.named_modules(remove_duplicate=False))
    linear = {name for name, module in modules.items() if is_linear(module)}
    apart = _part(model, checkpoint, "routers") | _part(model, checkpoint, "experts")
    tables = {part for table in _tables(model) for part in table.modules()}
    # Kernels of Mamba multiply by that weight themselves: they know nothing of an update beside it.
    fused = {f"{name}.out_proj" for name, module in modules.items() if hasattr(module, "A_log")}
    return sorted(
        name for name in linear - fused if f"{name}.weight" not in apart and modules[name] not in tables
    )


def _adapt(model: nn.Module, checkpoint: Checkpoint, options: TrainingOptions) -> None:
    """Give each linear layer of attentions and FFNs an update of a low rank, which learns alone (arXiv 2106.09685).

    With `train` "experts" each expert's weights instead. The update counts twice (alpha = 2 r), as is usual. A layer
    that several FFNs share has one.
    """
    peft = require_package(PEFT, "`lora`")

    rank = options.lora
    assert rank is not None
    modules = dict(model.named_modules(remove_duplicate=False))
    of_experts = options.train == "experts"
    targets = [] if of_experts else _linears(model, checkpoint)
    experts = _part(model, checkpoint, "experts") if of_experts and checkpoint.runs_stock else set()
    stacks = sorted(name for name, stack in model.named_parameters() if name in experts and stack.dim() == 3)
    if not targets and not stacks:
        what = "stacks of experts in its class" if of_experts else "linear layers of attentions or FFNs"
        raise UsageError(f"`lora`: the model has no {what}", "Leave it out.")
    # Around a model whose type it knows, peft would take layers called as experts once were for the stacks of today.
    around = nn.ModuleDict({"model": model})
    config = peft.LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        target_modules=[f"model.{name}" for name in targets],
        target_parameters=[f"model.{name}" for name in stacks] or None,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of GPT-2's transposed layers, which it sets right
        torch.manual_seed(options.seed)
        peft.inject_adapter_in_model(config, around)
    adapted = {id(modules[name]): model.get_submodule(name) for name in targets}
    for name, module in modules.items():  # the other names of a shared layer
        if id(module) in adapted and model.get_submodule(name) is module:
            model.set_submodule(name, adapted[id(module)])


def frozen_weights(model: nn.Module, options: TrainingOptions) -> list[torch.Tensor]:
    """The weights of linear layers and stacks of experts that do not learn, without tables of tokens."""
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    weights = [module.weight for module in model.modules() if is_linear(module)]
    if options.train != "experts":  # else low-rank updates are added to the stacks as they run
        weights += [
            getattr(module, name)
            for module in expert_modules(model).values()
            for name in part_names(module)[:2]
        ]
    return [weight for weight in weights if not weight.requires_grad and id(weight) not in tables]


def shorten_frozen(model: nn.Module, options: TrainingOptions) -> None:
    """Hold frozen weights in the type that training computes in, where it holds their very values.

    Autocast would make the same copies of those of linear layers, and keep them for the backward pass. Grouped products
    of experts it does not know: they are computed in the type of the weights.
    """
    for weight in frozen_weights(model, options):
        short = weight.detach().to(COMPUTE[options.dtype])
        if torch.equal(short.to(weight.dtype), weight):
            weight.data = short


def merged_state(model: nn.Module) -> Json:
    """The model's state dict after peft has added low-rank updates to the weights, in the model itself."""
    layers: list[Any] = [module for module in model.modules() if hasattr(module, "lora_A")]
    for layer in layers:
        # In float32 on the CPU, where there is room: the sum is rounded once, to the type of the result.
        layer.cpu().get_base_layer().float()
        layer.merge()
    return {
        name.replace(".base_layer", ""): value
        for name, value in model.state_dict().items()
        if ".lora_" not in name
    }


def trained_outputs(model: Any, source: Checkpoint) -> tuple[Output, ...]:
    """Every tensor of the result under `source`'s names, with the values of the model; others are copied.

    Args:
        model: trained from `source`.
    """
    state = merged_state(model)
    if source.runs_stock:
        trained = stored_form(model, state)
    else:
        state = stock_names(state, source.mixtures)
        # A tied tensor is held once, under whichever of its names the model has.
        places = {name: name if name in state else module_name(model, name) for name in source.tensors}
        trained = {name: state[place] for name, place in places.items() if place in state}

    def values(name: str, shape: tuple[int, ...]) -> Expression:
        if name not in trained:
            return Copy(name)
        # Cast part by part: beside the model there may be no memory for another.
        tensor = trained[name].reshape(shape or (1,))
        return Generated(shape, lambda start, stop: tensor[start:stop].float().cpu().numpy())

    return tuple(Output(*info, values(name, info.shape)) for name, info in source.tensors.items())


def decisive(options: TrainingOptions) -> Json:
    """The options that the weights after a given number of updates depend on, but for the teacher.

    The part that is trained is called "part": "train" is the text (`TrainingData.describe`).
    """
    apart = {
        *("loss", "steps", "epochs", "minutes", "patience", "device", "teacher", "teacher_logits"),
        "gradient_checkpointing",
        *(("train",) if options.train == "all" else ()),  # prunecli 0.1.0 knew no other
    }
    values = options.values_of(TrainingOptions).items()
    found = {"part" if key == "train" else key: value for key, value in values if key not in apart}
    return found | asdict(options.loss)
