"""What the code that the authors of 2212.09811 released does with their statistics, restated slowly.

Statistics: a field of several language pairs is the plain mean of the pairs' values, and a metric is computed from
these means. Thresholds: theta grows by 0.001; a layer keeps its first experts, and of the others those whose running
sum of shares, in which the first ones do not count, is below theta; layers take theirs in order up to the count.
"""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from math import exp


def importance(entries: Sequence[Mapping[str, Sequence[float]]]) -> list[float]:
    """Eq. 4 of the entries' means: one value per expert."""
    means = {}
    for field in ("top1", "conf1"):
        columns = zip(*(entry[field] for entry in entries), strict=True)
        means[field] = [sum(values) / len(entries) for values in columns]
    return [top1 * exp(conf1) for top1, conf1 in zip(means["top1"], means["conf1"], strict=True)]


def threshold_counts(layers: Sequence[Sequence[int]], count: int, first: int) -> tuple[list[int], Fraction]:
    """Experts per layer and theta; `layers` holds whole numbers, whose sums need not be one."""
    ordered = [sorted(layer, reverse=True) for layer in layers]
    for step in range(1, 1001):
        theta = Fraction(step, 1000)
        kept = []
        for layer in ordered:
            n = min(first, len(layer))
            while n < len(layer) and Fraction(sum(layer[first : n + 1]), sum(layer)) < theta:
                n += 1
            kept.append(n)
        if sum(kept) >= count:
            break
    left = count - sum(min(first, len(layer)) for layer in layers)
    for index, layer in enumerate(layers):
        more = min(kept[index] - min(first, len(layer)), left)
        kept[index] = min(first, len(layer)) + more
        left -= more
    return kept, theta
