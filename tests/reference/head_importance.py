"""Head importance as the paper defines it (1905.10650, 2.3 and 4.1), slowly: |dL/dxi_h| by differences, one example
at a time, the mask xi_h put on the weights of the output projection instead of on the activations."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def scaled_head(weight: torch.Tensor, heads: int, head: int, axis: int, xi: float) -> Iterator[None]:
    """Within the block the part of an output projection that belongs to one head is multiplied by xi."""
    before = weight.detach().clone()
    width = weight.shape[axis] // heads
    with torch.no_grad():
        weight.narrow(axis, head * width, width).mul_(xi)
    try:
        yield
    finally:
        with torch.no_grad():
            weight.copy_(before)


def importance(
    losses: list[Callable[[], float]], weight: torch.Tensor, heads: int, axis: int, step: float = 1e-2
) -> list[float]:
    """Sum over examples of |L(xi_h = 1 + step) - L(xi_h = 1 - step)| / (2 step) for every head h.

    Args:
        losses: one per example: its mean token loss with the model as it is.
        weight: of the output projection, the heads along `axis`.
    """
    found = []
    for head in range(heads):
        ends = []
        for xi in (1 + step, 1 - step):
            with scaled_head(weight, heads, head, axis, xi):
                ends.append([loss() for loss in losses])
        found.append(sum(abs(high - low) / (2 * step) for high, low in zip(*ends, strict=True)))
    return found


def token_importance(
    losses: list[tuple[Callable[[], float], int]], projection: torch.nn.Module, heads: int, step: float = 1e-2
) -> list[float]:
    """Sum over examples and their positions t of |L(xi_ht = 1 + step) - L(xi_ht = 1 - step)| / (2 step) for every head
    h, where the mask xi_ht weighs the head at the position t alone.

    Args:
        losses: per example its mean token loss with the model as it is, and the positions of the attention in it.
        projection: the output projection, to whose inputs `[1, T, heads x width]` the mask goes.
    """
    found = []
    for head in range(heads):
        total = 0.0
        for loss, positions in losses:
            for position in range(positions):
                ends = [
                    _with_mask(loss, projection, heads, head, position, 1 + sign * step) for sign in (1, -1)
                ]
                total += abs(ends[0] - ends[1]) / (2 * step)
        found.append(total)
    return found


def _with_mask(
    loss: Callable[[], float], projection: torch.nn.Module, heads: int, head: int, position: int, xi: float
) -> float:
    def hook(_module: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        context = inputs[0].clone()
        width = context.shape[-1] // heads
        context[0, position, head * width : (head + 1) * width] *= xi
        return (context, *inputs[1:])

    with projection.register_forward_pre_hook(hook):
        return loss()
