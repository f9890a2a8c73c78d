"""How alike the experts are that different language pairs select (2212.09811, section 6.2 and Table 4)."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

Pair = tuple[str, str]


def jaccard(first: Set[Any], second: Set[Any]) -> float:
    """|A ∩ B| / |A ∪ B|, in [0, 1]; 1 for two empty sets."""
    union = len(first | second)
    return 1.0 if union == 0 else len(first & second) / union


def jaccard_matrix(selections: Sequence[Set[Any]]) -> NDArray[np.float64]:
    """Jaccard similarity of all pairs of sets: [len(selections), len(selections)], symmetric, diagonal 1."""
    members = {
        member: column for column, member in enumerate(dict.fromkeys(m for s in selections for m in s))
    }
    holds = np.zeros((len(selections), max(len(members), 1)))
    for row, selection in enumerate(selections):
        holds[row, [members[member] for member in selection]] = 1
    both = holds @ holds.T
    sizes = holds.sum(axis=1)
    either = sizes[:, None] + sizes[None, :] - both
    matrix: NDArray[np.float64] = np.divide(both, either, out=np.ones_like(both), where=either > 0)
    return matrix


@dataclass(frozen=True)
class Spread:
    """Similarities of one group of comparisons; the values are nan where it holds none."""

    comparisons: int
    mean: float
    lowest: float
    highest: float


RELATIONS: dict[str, Callable[[Pair, Pair], bool]] = {
    "same source": lambda first, second: first[0] == second[0],
    "same target": lambda first, second: first[1] == second[1],
    "neither": lambda first, second: first[0] != second[0] and first[1] != second[1],
}
"""What two different pairs have in common -> whether they do."""


def spread_by_relation(pairs: Sequence[Pair], matrix: NDArray[np.float64]) -> dict[str, Spread]:
    """Mean, lowest and highest similarity of the pairs with a common source, a common target, or neither.

    Args:
        pairs: (source, target), all different.
        matrix: Jaccard similarities [len(pairs), len(pairs)].
    """
    found: dict[str, list[float]] = {relation: [] for relation in RELATIONS}
    for row, column in combinations(range(len(pairs)), 2):
        for relation, holds in RELATIONS.items():
            if holds(pairs[row], pairs[column]):
                found[relation].append(float(matrix[row, column]))
    return {relation: _spread(values) for relation, values in found.items()}


def _spread(values: Sequence[float]) -> Spread:
    if not values:
        return Spread(0, float("nan"), float("nan"), float("nan"))
    return Spread(len(values), float(np.mean(values)), min(values), max(values))


def two_triangles(lower: NDArray[np.float64], upper: NDArray[np.float64]) -> NDArray[np.float64]:
    """Table 4's layout: the lower triangle of one matrix, the upper of another, diagonal nan."""
    joined: NDArray[np.float64] = np.tril(lower, -1) + np.triu(upper, 1)
    np.fill_diagonal(joined, np.nan)
    return joined
