"""Similarities restated slowly: CKA and LNS (2309.01826, section 2.3), Jaccard (2212.09811, section 6), of layers."""

import math

import numpy as np


def gram_cka(first, second):
    """HSIC(K, L) / sqrt(HSIC(K, K) HSIC(L, L)) with K = X X^T, L = Y Y^T and H = I - 1/n (1905.00414, eq. 3 and 4)."""
    centre = np.eye(len(first)) - 1 / len(first)
    k, m = (centre @ np.matmul(rows, np.transpose(rows)) @ centre for rows in (first, second))
    return (k * m).sum() / math.sqrt((k * k).sum() * (m * m).sum())


def cosine(x, y):
    return sum(a * b for a, b in zip(x, y, strict=True)) / (math.hypot(*x) * math.hypot(*y) or 1.0)


def neighbours(rows, sentence, k):
    """The k other rows of the highest cosine; of equal ones the first."""
    others = [other for other in range(len(rows)) if other != sentence]
    return set(sorted(others, key=lambda other: (-round(cosine(rows[sentence], rows[other]), 12), other))[:k])


def lns(first, second, k):
    """Mean over sentences of the Jaccard similarity of their neighbours in the two spaces."""
    total = 0.0
    for sentence in range(len(first)):
        one, two = neighbours(first, sentence, k), neighbours(second, sentence, k)
        total += len(one & two) / len(one | two)
    return total / len(first)


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


def block_influence(before, after):
    """1 - E_t [x_t . y_t / (|x_t| |y_t|)] over the tokens (2403.03853, eq. 1)."""
    return 1 - sum(cosine(x, y) for x, y in zip(before, after, strict=True)) / len(before)


def angular_distance(before, after):
    """E_t arccos(x_t . y_t / (|x_t| |y_t|)) / pi (2403.17887, 3.2)."""
    angles = [math.acos(max(-1, min(1, cosine(x, y)))) for x, y in zip(before, after, strict=True)]
    return sum(angles) / math.pi / len(angles)
