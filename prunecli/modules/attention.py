"""The heads of a running model: what each puts out, and masks on it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

from torch import Tensor, nn

from prunecli.model.attention import AttentionLayer
from prunecli.model.patchwork import module_name


def output_projections(model: nn.Module, layers: Sequence[AttentionLayer]) -> dict[str, nn.Module]:
    """Attention's name -> the linear layer that mixes its heads; those without heads of their own are left out.

    Its input `[..., heads x width]` holds Att_h(x) of 2.3 before the head's part of the projection, in the order
    of `layer.heads`, each head with the same width.
    """
    return {
        layer.name: model.get_submodule(module_name(model, layer.output))
        for layer in layers
        if layer.heads and not layer.is_shared
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
            hooks.callback(projections[name].register_forward_pre_hook(partial(_weigh, mask)).remove)
        yield


def _weigh(mask: Tensor, _: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    context, *rest = inputs
    weights = mask.to(context.device, context.dtype)
    by_head = context.reshape(*context.shape[:-1], len(weights), -1) * weights[:, None]
    return (by_head.reshape(context.shape), *rest)
