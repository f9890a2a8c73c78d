"""Means by source, target and group of languages, from the definition: every pair counts the same."""

from __future__ import annotations

import math
from statistics import fmean


def mean_of(pairs: dict[str, dict[str, float]], score: str, source: set[str], target: set[str]) -> float:
    """The mean of a score over the pairs from one of `source` to one of `target`.

    Args:
        pairs: "SOURCE-TARGET" -> score -> value.
    """
    values = []
    for a in source:
        for b in target:
            if a != b and f"{a}-{b}" in pairs:
                values.append(pairs[f"{a}-{b}"][score])
    return fmean(values)


def differences_of(first, second, score, source, target):
    """Mean, standard deviation over all of them, lowest and highest of `second - first` of the pairs of `mean_of`."""
    pairs = [f"{a}-{b}" for a in source for b in target if a != b and f"{a}-{b}" in first]
    deltas = [second[pair][score] - first[pair][score] for pair in pairs]
    mean = fmean(deltas)
    std = math.sqrt(fmean([(delta - mean) ** 2 for delta in deltas]))
    return {"mean": mean, "std": std, "lowest": min(deltas), "highest": max(deltas)}
