"""Section 6 of 2212.09811 restated slowly and obviously."""

from __future__ import annotations

import math


def jaccard(first, second):
    """Members of both over members of either, counted one by one."""
    everything = list(first) + [item for item in second if item not in first]
    if not everything:
        return 1.0
    return sum(1 for item in everything if item in first and item in second) / len(everything)


def by_relation(pairs, matrix):
    """Relation of two pairs -> similarities of the pairs with it, each two once."""
    values = {"same source": [], "same target": [], "neither": []}
    for row in range(len(pairs)):
        for column in range(row + 1, len(pairs)):
            source, target = (pairs[row][side] == pairs[column][side] for side in (0, 1))
            if source:
                values["same source"].append(matrix[row][column])
            if target:
                values["same target"].append(matrix[row][column])
            if not source and not target:
                values["neither"].append(matrix[row][column])
    return values


def average_linkage_distances(vectors):
    """The mean distances at which the nearest two clusters join, comparing all members of all clusters."""
    clusters = [[vector] for vector in vectors]
    joined = []
    while len(clusters) > 1:
        candidates = []
        for i, one in enumerate(clusters):
            for j in range(i):
                distances = [math.dist(a, b) for a in one for b in clusters[j]]
                candidates.append((sum(distances) / len(distances), j, i))
        distance, j, i = min(candidates)
        joined.append(distance)
        clusters[j] = clusters[j] + clusters.pop(i)
    return joined
