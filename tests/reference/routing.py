"""Equations 1 and 2 of arXiv 2212.09811, token by token and expert by expert, in float64; gradients go through."""

from collections.abc import Sequence

import torch
from torch import Tensor


def gates(x: Tensor, router: Tensor) -> Tensor:
    """G = softmax(W_g x), eq. 1. x `[d_model]`, router `[experts, d_model]`."""
    logits = torch.stack([sum(a * b for a, b in zip(row, x, strict=True)) for row in router])
    powers = (logits - logits.max()).exp()
    return powers / powers.sum()


def chosen(gate: Tensor) -> list[int]:
    """The best and the second expert; the lower number wins a tie."""
    return sorted(range(len(gate)), key=lambda e: (-float(gate[e]), e))[:2]


def expert(x: Tensor, fc1: Tensor, b1: Tensor, fc2: Tensor, b2: Tensor) -> Tensor:
    """E(x) = max(0, W1 x + b1) W2 + b2."""
    return fc2 @ (fc1 @ x + b1).clamp(min=0) + b2


def sparse_ffn(tokens: Tensor, router: Tensor, parts: Sequence[Tensor], token_dropout: float = 0.0) -> Tensor:
    """y_t = sum over the two chosen e of G_e E_e(x_t) / sum over the same of G_e, eq. 2, times (1 - p).

    Args:
        parts: W1, b1, W2, b2, each of all experts.
    """
    rows = []
    for x in tokens.double():
        gate = gates(x, router.double())
        pair = chosen(gate)
        total = sum(gate[e] * expert(x, *(part[e].double() for part in parts)) for e in pair)
        rows.append(total / sum(gate[e] for e in pair) * (1 - token_dropout))
    return torch.stack(rows)
