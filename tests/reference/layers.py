"""How far a layer moves the hidden states, restated slowly (2403.03853, eq. 1; 2403.17887, 3.2)."""

from __future__ import annotations

import math


def cosine(x, y):
    return sum(a * b for a, b in zip(x, y, strict=True)) / (math.hypot(*x) * math.hypot(*y))


def block_influence(before, after):
    """1 - E_t [x_t . y_t / (|x_t| |y_t|)] over the tokens."""
    return 1 - sum(cosine(x, y) for x, y in zip(before, after, strict=True)) / len(before)


def angular_distance(before, after):
    """E_t arccos(x_t . y_t / (|x_t| |y_t|)) / pi."""
    angles = [math.acos(max(-1, min(1, cosine(x, y)))) for x, y in zip(before, after, strict=True)]
    return sum(angles) / math.pi / len(angles)
