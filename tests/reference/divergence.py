"""Divergence of next-token distributions and agreement of continuations, one position at a time in float64."""

import math
from collections.abc import Sequence
from typing import Any

import torch


def distributions(model: Any, ids: Sequence[int], counted: int) -> list[list[float]]:
    """Logarithms of the probabilities of what comes at each of the last `counted` places."""
    with torch.no_grad():
        logits = model(torch.tensor([list(ids)])).logits[0].double()
    return [
        torch.log_softmax(logits[place - 1], dim=0).tolist() for place in range(len(ids) - counted, len(ids))
    ]


def divergence(p: Sequence[float], q: Sequence[float]) -> float:
    """sum_v p(v) (log p(v) - log q(v)), of logarithms."""
    return math.fsum(math.exp(a) * (a - b) for a, b in zip(p, q, strict=True))


def compared(models: Sequence[Any], ids: Sequence[int], counted: int) -> list[tuple[float, bool]]:
    """Divergence at each counted place, and whether both models have the same most probable token there."""
    both = zip(*(distributions(model, ids, counted) for model in models), strict=True)
    return [(divergence(p, q), p.index(max(p)) == q.index(max(q))) for p, q in both]


def continued(model: Any, prompt: Sequence[int], count: int, end: int | None) -> list[int]:
    """So many tokens, each the most probable one after all before it, computed anew; less where `end` comes."""
    ids = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] == end:
            break
    return ids[len(prompt) :]
