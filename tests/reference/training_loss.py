"""The losses of training, token by token, in float64: label smoothing, distillation, hidden states."""

import math
from collections.abc import Sequence


def softmax(logits: Sequence[float], temperature: float = 1.0) -> list[float]:
    highest = max(logits)
    powers = [math.exp((value - highest) / temperature) for value in logits]
    return [power / sum(powers) for power in powers]


def smoothed(logits: Sequence[float], target: int, smoothing: float) -> float:
    """Cross-entropy with (1 - e) of the mass on the target and e spread over all tokens."""
    found = softmax(logits)
    wanted = [smoothing / len(logits)] * len(logits)
    wanted[target] += 1 - smoothing
    return -sum(share * math.log(p) for share, p in zip(wanted, found, strict=True))


def divergence(logits: Sequence[float], taught: Sequence[float], temperature: float) -> float:
    """T^2 KL(teacher || student), both softened by T."""
    teacher, student = softmax(taught, temperature), softmax(logits, temperature)
    return temperature**2 * sum(q * math.log(q / s) for q, s in zip(teacher, student, strict=True))


def squared_distance(hidden: Sequence[float], taught: Sequence[float]) -> float:
    """Mean over the width."""
    return sum((a - b) ** 2 for a, b in zip(hidden, taught, strict=True)) / len(hidden)
