"""Matthews' correlation restated: of two classes by the confusion table, of more by Gorodkin's covariances."""

from __future__ import annotations

import math


def matthews_binary(labels, chosen):
    """(TP TN - FP FN) / sqrt((TP + FP) (TP + FN) (TN + FP) (TN + FN)) of the classes 0 and 1; 0 where that is 0 / 0."""
    cells = dict.fromkeys(((0, 0), (0, 1), (1, 0), (1, 1)), 0)
    for pair in zip(labels, chosen, strict=True):
        cells[pair] += 1
    tn, fp, fn, tp = cells[0, 0], cells[0, 1], cells[1, 0], cells[1, 1]
    below = (tp + fp) * (tp + fn) * (tn + fp) * (tn + fn)
    return (tp * tn - fp * fn) / math.sqrt(below) if below else 0.0


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
