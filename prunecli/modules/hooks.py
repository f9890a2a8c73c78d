"""Hooks on a running model: masks on its heads, and outputs of a part that are recorded and returned again."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, TypeVar

from torch import Tensor, nn

from prunecli.model.checkpoint import Checkpoint
from prunecli.model.parts import AttentionLayer
from prunecli.model.patchwork import module_name, submodule

Key = TypeVar("Key")
Outputs = dict[str, Any]
"""Module's name -> what its last call returned."""


def unchanged_below(model: Any, checkpoint: Checkpoint, *, decoder: bool) -> dict[str, tuple[str, ...]]:
    """Attention's name -> the modules whose outputs do not depend on its heads.

    For an attention of the encoder these are the encoder's lower layers; for one of the decoder the whole encoder and,
    with `decoder`, the lower layers of the decoder (a decoder that is called token by token has no one output).
    """
    blocks: dict[str, list[str]] = {}
    for block in checkpoint.layout.layers:
        blocks.setdefault(block.side, []).append(module_name(model, block.name))
    encoder = model.get_encoder() if len(blocks) > 1 else None
    whole = [path for path, module in model.named_modules() if module is encoder]
    return {
        layer.name: (
            tuple(blocks["encoder"][: layer.layer])
            if layer.kind == "encoder"
            else (*whole, *(blocks["decoder"][: layer.layer] if decoder else ()))
        )
        for layer in checkpoint.layout.attentions
    }


def states_of(output: Any) -> Tensor:
    """The hidden states in what a layer, or a part of one, returned: others return more behind them."""
    states: Tensor = output[0] if isinstance(output, tuple | list) else output
    return states


@contextmanager
def recording(model: nn.Module, names: Iterable[str]) -> Iterator[Outputs]:
    """Record the outputs of the named modules within the block."""
    outputs = {}

    def keep(name: str, _module: nn.Module, _inputs: Any, output: Any) -> None:
        outputs[name] = _copy(output)

    with ExitStack() as hooks:  # not `replaced`: generate asks the encoder's forward pass what it takes
        for name in names:
            hooks.enter_context(model.get_submodule(name).register_forward_hook(partial(keep, name)))
        yield outputs


def replaying(model: nn.Module, outputs: Mapping[str, Any]) -> AbstractContextManager[None]:
    """Within the block the named modules return these outputs, whatever they are given."""
    modules = {name: model.get_submodule(name) for name in outputs}
    return replaced(modules, lambda name, *_, **__: _copy(outputs[name]))


def _copy(output: Any) -> Any:
    """Another object of the same tensors: `generate` changes what an encoder gives it."""
    return type(output)(**output) if isinstance(output, Mapping) else output


@contextmanager
def replaced(modules: Mapping[Key, nn.Module], compute: Callable[..., Any]) -> Iterator[None]:
    """Within the block, `compute(key of the module, its own forward, ...)` computes each module's output."""
    with ExitStack() as undone:
        for key, module in modules.items():
            if "forward" in vars(module):
                undone.callback(setattr, module, "forward", module.forward)
            else:
                undone.callback(delattr, module, "forward")
            module.forward = partial(compute, key, module.forward)
        yield


def output_projections(model: nn.Module, layers: Sequence[AttentionLayer]) -> dict[str, nn.Module]:
    """Attention's name -> the linear layer that mixes its heads; those without heads of their own are left out.

    Its input `[..., heads x width]` holds Att_h(x) of 2.3 before the head's part of the projection, in the order
    of `layer.heads`, each head with the same width.
    """
    return {
        layer.name: submodule(model, layer.output) for layer in layers if layer.heads and not layer.is_shared
    }


@contextmanager
def masked_heads(
    model: nn.Module, layers: Sequence[AttentionLayer], masks: Mapping[str, Tensor]
) -> Iterator[None]:
    """Within the block, each head's output is multiplied by its mask xi_h (2.3): 0 removes it.

    Args:
        layers: those of the checkpoint that the model was loaded from.
        masks: attention's name -> `[heads]`, in the order of `layer.heads`.
    """
    projections = output_projections(model, layers)
    with ExitStack() as hooks:
        for name, mask in masks.items():
            hooks.enter_context(projections[name].register_forward_pre_hook(partial(_weigh, mask)))
        yield


def _weigh(mask: Tensor, _: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    context, *rest = inputs
    weights = mask.to(context.device, context.dtype)
    by_head = context.reshape(*context.shape[:-1], len(weights), -1) * weights[:, None]
    return (by_head.reshape(context.shape), *rest)
