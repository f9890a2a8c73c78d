"""Muon for the demo's many small matrices: momentum, made orthogonal. It learns in about half of Adam's steps.

Jordan et al., 2024, https://kellerjordan.github.io/posts/muon/
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic a s + b s^3 + c s^5, which drives singular values towards 1 (between about 0.7 and 1.2)."""


def orthogonalize(matrices: Tensor, iterations: int = 5) -> Tensor:
    """The nearest semi-orthogonal matrix to each of `[count, rows, columns]`, roughly, by Newton-Schulz iteration."""
    a, b, c = COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(iterations):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    result: Tensor = x.mT if tall else x
    return result


class Muon:
    """Updates matrices `[rows, columns]` and stacks of them `[count, rows, columns]`.

    Args:
        parameters: their gradients are read at each step.
        momentum: of the running mean of gradients (Nesterov's form).
    """

    def __init__(self, parameters: Sequence[Tensor], momentum: float = 0.95) -> None:
        self.momentum = momentum
        self.means = [torch.zeros_like(parameter) for parameter in parameters]
        self.groups: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = {}
        for parameter, mean in zip(parameters, self.means, strict=True):
            rows, columns = parameter.shape[-2:]
            self.groups.setdefault((rows, columns), []).append((parameter, mean))

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """One update. Matrices of one shape go through the iteration together."""
        for (rows, columns), members in self.groups.items():
            updates = [self._update(parameter, mean) for parameter, mean in members]
            stacked = orthogonalize(torch.cat([update.reshape(-1, rows, columns) for update in updates]))
            scale = learning_rate * max(1.0, rows / columns) ** 0.5
            counts = [update.numel() // (rows * columns) for update in updates]
            for (parameter, _), direction in zip(members, torch.split(stacked, counts), strict=True):
                parameter.add_(direction.reshape(parameter.shape), alpha=-scale)

    def _update(self, parameter: Tensor, mean: Tensor) -> Tensor:
        if parameter.grad is None:
            return torch.zeros_like(parameter)
        mean.lerp_(parameter.grad, 1 - self.momentum)
        return parameter.grad.lerp(mean, self.momentum)
