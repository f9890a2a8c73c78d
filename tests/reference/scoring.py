"""Significance and means of scores, stated slowly."""

import math
from collections.abc import Sequence
from statistics import fmean, pstdev
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


def values_of(pairs, score, source, target):
    """A score of each pair from one of `source` to one of `target`; `pairs`: "SOURCE-TARGET" -> score -> value."""
    ends = {pair: pair.split("-") for pair in pairs}
    return [pairs[pair][score] for pair, (a, b) in ends.items() if a in source and b in target]


def mean_of(*given):
    """The mean of `values_of`."""
    return fmean(values_of(*given))


def differences_of(first, second, *chosen):
    """Mean, standard deviation over all of them, lowest and highest of `second - first` of the pairs of `values_of`."""
    deltas = [b - a for a, b in zip(*(values_of(own, *chosen) for own in (first, second)), strict=True)]
    figures = {"mean": fmean(deltas), "std": pstdev(deltas)}
    return {**figures, "lowest": min(deltas), "highest": max(deltas)}


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
