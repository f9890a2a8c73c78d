"""Measure: the gradient importance of every attention head (1905.10650, 4.1), in one forward and one backward pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from prunecli.errors import PruneError
from prunecli.model.attention import AttentionLayer
from prunecli.modules.attention import output_projections
from prunecli.progress import Progress, silent
from prunecli.results.unit_scores import Per
from prunecli.running.examples import Batch
from prunecli.running.losses import Losses, differentiate_losses, example_losses
from prunecli.running.runner import Runner

HeadSums = dict[str, NDArray[np.float64]]
"""Attention's name -> a sum over the examples, or their tokens, for each head that it holds."""


def gradient_importance(
    runner: Runner,
    layers: Sequence[AttentionLayer],
    batches: Mapping[str, Sequence[Batch]],
    progress: Progress = silent,
    *,
    per: Per = "example",
    losses_of: Losses = example_losses,
) -> HeadSums:
    """Sum over examples x of |Att_h(x)^T dL(x)/dAtt_h(x)| (eq. 2), which is |dL(x)/dxi_h|, for every head h.

    The product is summed over an example's positions before its absolute value is taken; L(x) is the example's mean
    token loss. Per token the absolute value is taken at each position, as in the code that the paper's authors
    released, and the sum is over the positions of all examples. Padding adds nothing: no loss depends on it.

    Args:
        runner: of a model in float32 or bfloat16 (float16 loses small gradients).
        layers: the attentions of its checkpoint.
        batches: what a message calls their text -> batches.
        per: what the absolute value is taken of.
        losses_of: L(x) of each example of a batch.

    Raises:
        DataError: an example's loss is not finite.
        PruneError: a gradient is not finite.
        UsageError, CheckpointError, OutputError: as `runner` does.
    """
    sums: dict[str, Tensor] = {}

    def hook(name: str, heads: int, _: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        context, *rest = inputs
        if not context.requires_grad:  # nothing below has heads: the graph begins here
            context = context.detach().requires_grad_()
        held = [context.detach()]

        def multiply(gradient: Tensor) -> None:
            product = held.pop().float() * gradient  # popped: freed as the backward pass goes down
            by_head = product.view(len(product), -1, heads, product.shape[-1] // heads)
            summed = by_head.sum(dim=3 if per == "token" else (1, 3))
            added = summed.abs().flatten(0, -2).sum(dim=0, dtype=torch.float64)
            sums[name] = sums[name] + added if name in sums else added

        context.register_hook(multiply)  # type: ignore[no-untyped-call]
        return (context, *rest)

    held_heads = {layer.name: layer.num_heads for layer in layers}
    with ExitStack() as hooks:
        for name, projection in output_projections(runner.model, layers).items():
            handle = projection.register_forward_pre_hook(partial(hook, name, held_heads[name]))
            hooks.callback(handle.remove)
        differentiate_losses(runner, batches, "scoring heads", progress, losses_of=losses_of)
    found: HeadSums = {}
    for name, heads in held_heads.items():
        found[name] = sums[name].cpu().numpy() if name in sums else np.zeros(heads)  # no gradient came
        if not np.isfinite(found[name]).all():
            raise PruneError(
                f"{name}: a gradient is not finite, though every loss is", "Compute with --dtype float32."
            )
    return found
