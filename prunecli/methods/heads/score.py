"""Measure: the gradient importance of every attention head (1905.10650, 4.1), in one forward and one backward pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from prunecli.errors import PruneError
from prunecli.model.attention import AttentionLayer
from prunecli.modules.attention import output_projections
from prunecli.progress import Progress, silent
from prunecli.results.heads import Per
from prunecli.running.examples import Batch
from prunecli.running.losses import example_losses, require_finite
from prunecli.running.runner import frozen

HeadSums = dict[str, NDArray[np.float64]]
"""Attention's name -> a sum over the examples, or their tokens, for each head that it holds."""


def gradient_importance(
    model: Any,
    layers: Sequence[AttentionLayer],
    batches: Mapping[str, Sequence[Batch]],
    progress: Progress = silent,
    *,
    per: Per = "example",
) -> HeadSums:
    """Sum over examples x of |Att_h(x)^T dL(x)/dAtt_h(x)| (eq. 2), which is |dL(x)/dxi_h|, for every head h.

    The product is summed over an example's positions before its absolute value is taken; L(x) is the example's mean
    token loss. The examples of a batch do not interact, so the gradient of the sum of their losses holds each
    example's own. Parameters get no gradients.

    Per token the absolute value is taken at each position, as in the code that the paper's authors released, and the
    sum is over the positions of all examples. Padding adds nothing: no loss depends on it.

    Args:
        model: what `load_model` made, in evaluation mode, in float32 or bfloat16 (float16 loses small gradients).
        layers: the attentions of its checkpoint.
        batches: what a message calls their text -> batches.
        per: what the absolute value is taken of.

    Raises:
        DataError: an example's loss is not finite.
        PruneError: a gradient is not finite.
    """
    total = sum(len(batch.indices) for found in batches.values() for batch in found)
    with (
        torch.enable_grad(),
        frozen(model),
        head_products(model, layers, per) as products,
        progress("scoring heads", total, "examples") as advance,
    ):
        for text, found in batches.items():
            for batch in found:
                losses = example_losses(model, batch)
                require_finite(losses.detach(), batch, text)
                losses.sum().backward()  # type: ignore[no-untyped-call]
                advance(len(batch.indices))
    return {layer.name: taken(layer, products.get(layer.name)) for layer in layers}


@contextmanager
def head_products(
    model: nn.Module, layers: Sequence[AttentionLayer], per: Per = "example"
) -> Iterator[dict[str, Tensor]]:
    """Attention's name -> `[heads]` float64, grown by each backward pass within the block."""
    sums: dict[str, Tensor] = {}
    heads = {layer.name: layer.num_heads for layer in layers}
    with ExitStack() as hooks:
        for name, projection in output_projections(model, layers).items():
            handle = projection.register_forward_pre_hook(_watch(name, heads[name], sums, per))
            hooks.callback(handle.remove)
        yield sums


def _watch(name: str, heads: int, sums: dict[str, Tensor], per: Per) -> Any:
    summed = 3 if per == "token" else (1, 3)

    def hook(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        context, *rest = inputs
        if not context.requires_grad:  # nothing below has heads: the graph begins here
            context = context.detach().requires_grad_()
        held = [context.detach()]

        def multiply(gradient: Tensor) -> None:
            product = held.pop().float() * gradient  # popped: freed as the backward pass goes down
            by_head = product.view(len(product), -1, heads, product.shape[-1] // heads).sum(dim=summed)
            added = by_head.abs().flatten(0, -2).sum(dim=0, dtype=torch.float64)
            sums[name] = sums[name] + added if name in sums else added

        context.register_hook(multiply)  # type: ignore[no-untyped-call]
        return (context, *rest)

    return hook


def taken(layer: AttentionLayer, found: Tensor | None) -> NDArray[np.float64]:
    """What `head_products` found of an attention.

    Raises:
        PruneError: a gradient was not finite.
    """
    values: NDArray[np.float64] = np.zeros(layer.num_heads) if found is None else found.cpu().numpy()
    if not np.isfinite(values).all():
        raise PruneError(
            f"{layer.name}: a gradient is not finite, though every loss is", "Compute with --dtype float32."
        )
    return values
