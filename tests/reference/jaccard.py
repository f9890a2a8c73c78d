"""Section 6 of 2212.09811 restated slowly and obviously."""

from __future__ import annotations

import math


def jaccard(first, second):
    """Members of both over members of either, counted one by one."""
    everything = list(first) + [item for item in second if item not in first]
    if not everything:
        return 1.0
    return sum(1 for item in everything if item in first and item in second) / len(everything)


def single_linkage_distances(vectors):
    """The distances at which the nearest two clusters join, by comparing every member of every cluster."""
    clusters = [[vector] for vector in vectors]
    joined = []
    while len(clusters) > 1:
        distance, first, second = min(
            (min(math.dist(a, b) for a in clusters[i] for b in clusters[j]), i, j)
            for i in range(len(clusters))
            for j in range(i)
        )
        joined.append(distance)
        clusters[first] += clusters.pop(second) if second > first else clusters[second]
        if second < first:
            clusters.pop(second)
    return joined
