"""Head importance as the paper defines it (1905.10650, 2.3 and 4.1), slowly: |dL/dxi_h| by differences, one example
at a time, the mask xi_h put on what the output projection is given."""

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle


def scaled_head(
    projection: torch.nn.Module, heads: int, head: int, xi: float, position: int | slice = slice(None)
) -> RemovableHandle:
    """Within the block one head is multiplied by xi in the inputs `[..., T, heads x width]` of an output projection."""

    def scale(_module: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        context = inputs[0].clone()
        width = context.shape[-1] // heads
        context[..., position, head * width : (head + 1) * width] *= xi
        return (context, *inputs[1:])

    return projection.register_forward_pre_hook(scale)


def importance(
    losses: list[Callable[[], float]],
    projection: torch.nn.Module,
    heads: int,
    step: float,
    positions: Sequence[int | slice] = (slice(None),),
) -> list[float]:
    """Sum over examples of |L(xi_h = 1 + step) - L(xi_h = 1 - step)| / (2 step) for every head h.

    Args:
        losses: one per example: its mean token loss with the model as it is.
        projection: the output projection of the heads.
        positions: where the mask goes, one after another; what they give is added up.
    """
    found = []
    for head in range(heads):
        total = 0.0
        for loss, position in product(losses, positions):
            ends = []
            for xi in (1 + step, 1 - step):
                with scaled_head(projection, heads, head, xi, position):
                    ends.append(loss())
            total += abs(ends[0] - ends[1]) / (2 * step)
        found.append(total)
    return found
