"""Significance and means of scores, stated slowly."""

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import numpy as np


def paired_p_value(
    metric: Any,
    baseline: Sequence[str],
    system: Sequence[str],
    references: Sequence[str],
    samples: int,
    seed: int,
) -> float:
    """Share of the resamples whose centred difference exceeds the real one, with one added to both counts.

    Every resample is scored as a corpus of its own: Koehn (2004), as in
    Moses' bootstrap-hypothesis-difference-significance.pl.
    """

    def score(outputs: Sequence[str], chosen: Sequence[int]) -> float:
        return metric.corpus_score([outputs[i] for i in chosen], [[references[i] for i in chosen]]).score

    every = list(range(len(references)))
    real = abs(score(baseline, every) - score(system, every))
    draws = np.random.default_rng(seed).choice(len(references), size=(samples, len(references)), replace=True)
    differences = np.array([abs(score(system, row) - score(baseline, row)) for row in draws.tolist()])
    centred = differences - differences.mean()
    return float((np.sum(centred > real) + 1) / (samples + 1))


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


def matthews(labels, chosen):
    """cov(X, Y) / sqrt(cov(X, X) cov(Y, Y)): X and Y have a row for each example, 1 at its class and 0 elsewhere, and a
    covariance is the sum over the classes of those of the columns (Gorodkin 2004)."""
    classes = sorted({*labels, *chosen})

    def covariance(first, second):
        total = 0.0
        for name in classes:
            x, y = ([float(value == name) for value in values] for values in (first, second))
            mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
            total += sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
        return total

    below = covariance(labels, labels) * covariance(chosen, chosen)
    return covariance(labels, chosen) / math.sqrt(below) if below > 1e-12 else 0.0
