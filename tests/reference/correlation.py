"""Pearson's and Spearman's correlation restated slowly and obviously, with the p-value of Student's t."""

from __future__ import annotations

import math


def pearson(first, second):
    n = len(first)
    sum_x, sum_y = sum(first), sum(second)
    product = n * sum(x * y for x, y in zip(first, second, strict=True)) - sum_x * sum_y
    spread_x = n * sum(x * x for x in first) - sum_x**2
    spread_y = n * sum(y * y for y in second) - sum_y**2
    return product / math.sqrt(spread_x * spread_y)


def ranks(values):
    """1 for the smallest; equal values share the mean of their ranks."""
    return [
        sum(other < value for other in values) + (sum(other == value for other in values) + 1) / 2
        for value in values
    ]


def spearman(first, second):
    return pearson(ranks(first), ranks(second))


def p_value(r, n, steps=200_000):
    """P(|T| >= |t|), t = r sqrt((n - 2) / (1 - r^2)), T of Student with n - 2 degrees: its density by trapezoids."""
    degrees = n - 2
    t = abs(r) * math.sqrt(degrees / (1 - r * r))
    scale = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)) / math.sqrt(degrees * math.pi)
    heights = [(1 + (t * i / steps) ** 2 / degrees) ** (-(degrees + 1) / 2) for i in range(steps + 1)]
    inside = t / steps * (sum(heights) - (heights[0] + heights[-1]) / 2)
    return 1 - 2 * scale * inside
