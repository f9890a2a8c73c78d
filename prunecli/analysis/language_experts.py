"""Languages that use the same experts: similarity of selections (2212.09811, 6.2), clustering by importance (6.3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.cluster import hierarchy

from prunecli.results.languages import Relation, Tree

Pair = tuple[str, str]
Node: TypeAlias = Mapping[str, Any] | str
"""A cluster, {"distance", "members": [node, node]}, or the name of a leaf."""
LinkageMethod = Literal["ward", "average", "complete", "single"]


def jaccard_matrix(selections: Sequence[Set[Any]]) -> NDArray[np.float64]:
    """|A ∩ B| / |A ∪ B| of all pairs of sets: [len(selections), len(selections)], symmetric; 1 for two empty sets."""
    members = {
        member: column for column, member in enumerate(dict.fromkeys(m for s in selections for m in s))
    }
    holds = np.zeros((len(selections), max(len(members), 1)), np.float32)  # counts below 2^24 are exact in it
    for row, selection in enumerate(selections):
        holds[row, [members[member] for member in selection]] = 1
    both = (holds @ holds.T).astype(np.float64)
    sizes = both.diagonal()
    either = sizes[:, None] + sizes[None, :] - both
    matrix: NDArray[np.float64] = np.divide(both, either, out=np.ones_like(both), where=either > 0)
    return matrix


RELATIONS = ("same source", "same target", "neither")
"""What two different pairs have in common."""


def spread_by_relation(pairs: Sequence[Pair], matrix: NDArray[np.float64]) -> dict[str, Relation | None]:
    """Mean, lowest and highest similarity of the pairs with a common source, a common target, or neither.

    A relation that no two pairs have is None. Values are rounded to 6 digits.

    Args:
        pairs: (source, target), all different.
        matrix: Jaccard similarities [len(pairs), len(pairs)].
    """
    names = np.array(pairs, dtype=str).reshape(-1, 2)
    source, target = (names[:, None, side] == names[None, :, side] for side in (0, 1))
    above = np.triu(np.ones(matrix.shape, bool), 1)  # each two pairs once
    found: dict[str, Relation | None] = {}
    for relation, holds in zip(RELATIONS, (source, target, ~source & ~target), strict=True):
        values = matrix[above & holds]
        found[relation] = None
        if len(values):
            mean, lowest, highest = (round(float(f(values)), 6) for f in (np.mean, np.min, np.max))
            found[relation] = Relation(comparisons=len(values), mean=mean, lowest=lowest, highest=highest)
    return found


def two_triangles(lower: NDArray[np.float64], upper: NDArray[np.float64]) -> NDArray[np.float64]:
    """Table 4's layout: the lower triangle of one matrix, the upper of another, diagonal nan."""
    joined: NDArray[np.float64] = np.tril(lower, -1) + np.triu(upper, 1)
    np.fill_diagonal(joined, np.nan)
    return joined


def feature_vector(values: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
    """Concatenated metric values `[layers * experts]` of sparse layers, each layer normalised to sum 1.

    A layer without any token stays zero.
    """
    parts = [np.asarray(layer, dtype=np.float64) for layer in values]
    return np.concatenate([layer / total if (total := layer.sum()) > 0 else layer for layer in parts])


def cluster(
    vectors: Mapping[str, NDArray[np.float64]],
    method: LinkageMethod = "ward",
    kind: Literal["languages", "texts"] = "languages",
) -> Tree | None:
    """Hierarchical clustering by Euclidean distance; None for fewer than two vectors.

    Args:
        vectors: language or text -> feature vector `[layers * experts]`, all of one length (`feature_vector`).
        method: how the distance of two clusters follows from that of their members.
        kind: the field of the result that names the leaves.
    """
    if len(vectors) < 2:
        return None
    matrix = hierarchy.linkage(np.stack(list(vectors.values())), method=method)
    nodes: list[Any] = list(vectors)
    for first, second, distance, _ in matrix:
        # The tighter cluster comes first, single leaves last.
        members = sorted((nodes[int(first)], nodes[int(second)]), key=_tightness)
        nodes.append({"distance": float(distance), "members": members})
    order = leaves(nodes[-1])
    return Tree(**{kind: list(vectors)}, order=order, clusters=nodes[-1], matrix=matrix.tolist())


def _tightness(node: Node) -> float:
    return float("inf") if isinstance(node, str) else float(node["distance"])


def leaves(node: Node) -> list[str]:
    """The leaves below a node, in the tree's order."""
    return (
        [node] if isinstance(node, str) else [leaf for member in node["members"] for leaf in leaves(member)]
    )
