"""Equations 1 and 2 of arXiv 2212.09811, token by token and expert by expert, in float64."""

import numpy as np


def gates(x: np.ndarray, router: np.ndarray) -> np.ndarray:
    """G = softmax(W_g x), eq. 1. x `[d_model]`, router `[experts, d_model]`."""
    logits = np.array([sum(float(a) * float(b) for a, b in zip(row, x, strict=True)) for row in router])
    powers = np.exp(logits - logits.max())
    return powers / powers.sum()


def chosen(gate: np.ndarray) -> tuple[int, int]:
    """The best and the second expert; the lower number wins a tie."""
    ranked = sorted(range(len(gate)), key=lambda e: (-gate[e], e))
    return ranked[0], ranked[1]


def expert(x: np.ndarray, fc1: np.ndarray, b1: np.ndarray, fc2: np.ndarray, b2: np.ndarray) -> np.ndarray:
    """E(x) = max(0, W1 x + b1) W2 + b2."""
    return fc2 @ np.maximum(fc1 @ x + b1, 0.0) + b2


def sparse_ffn(
    tokens: np.ndarray,
    router: np.ndarray,
    experts: list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]],
    token_dropout: float = 0.0,
) -> np.ndarray:
    """y_t = sum over the two chosen e of G_e E_e(x_t) / sum over the same of G_e, eq. 2, times (1 - p)."""
    out = np.zeros_like(tokens, dtype=np.float64)
    for t, x in enumerate(tokens.astype(np.float64)):
        gate = gates(x, router)
        first, second = chosen(gate)
        total = gate[first] + gate[second]
        for e in (first, second):
            out[t] += gate[e] / total * expert(x, *experts[e]) * (1 - token_dropout)
    return out
