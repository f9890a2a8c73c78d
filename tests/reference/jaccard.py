"""Section 6 of 2212.09811 restated slowly and obviously."""

from __future__ import annotations


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
