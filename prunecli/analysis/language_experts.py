"""Which languages use the same experts: similarity of selections (2212.09811, 6.2), clustering by importance (6.3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Literal, Union, cast, get_args

import numpy as np
from numpy.typing import NDArray
from scipy.cluster import hierarchy

from prunecli.errors import UsageError
from prunecli.results.languages import Relation

Pair = tuple[str, str]
LinkageMethod = Literal["ward", "average", "complete", "single"]


def parse_linkage(name: str) -> LinkageMethod:
    """The method of this name.

    Raises:
        UsageError: there is none.
    """
    known = get_args(LinkageMethod)
    if name not in known:
        raise UsageError(f"No linkage {name!r}.", f"Choose one of {', '.join(known)}.")
    return cast("LinkageMethod", name)


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
    source, target = (_same([pair[side] for pair in pairs]) for side in (0, 1))
    above = np.triu(np.ones((len(pairs), len(pairs)), bool), 1)  # each two pairs once
    relations = zip(RELATIONS, (source, target, ~source & ~target), strict=True)
    return {relation: _spread(matrix[above & holds]) for relation, holds in relations}


def _same(languages: Sequence[str]) -> NDArray[np.bool_]:
    """Which are equal: [len(languages), len(languages)]."""
    numbers = np.unique(np.asarray(languages, dtype=str), return_inverse=True)[1]
    return np.asarray(numbers[:, None] == numbers[None, :])


def _spread(values: NDArray[np.float64]) -> Relation | None:
    if not len(values):
        return None
    mean, lowest, highest = (round(float(value), 6) for value in (values.mean(), values.min(), values.max()))
    return Relation(comparisons=len(values), mean=mean, lowest=lowest, highest=highest)


def two_triangles(lower: NDArray[np.float64], upper: NDArray[np.float64]) -> NDArray[np.float64]:
    """Table 4's layout: the lower triangle of one matrix, the upper of another, diagonal nan."""
    joined: NDArray[np.float64] = np.tril(lower, -1) + np.triu(upper, 1)
    np.fill_diagonal(joined, np.nan)
    return joined


Node = Union["Cluster", str]
"""A cluster, or the language that a leaf stands for."""


@dataclass(frozen=True)
class Cluster:
    """Two groups of languages that join at `distance`, the nearer relatives first."""

    distance: float
    members: tuple[Node, Node]

    def to_json(self) -> dict[str, Any]:
        """{"distance", "members": [language or cluster, …]}."""
        return {
            "distance": self.distance,
            "members": [member if isinstance(member, str) else member.to_json() for member in self.members],
        }


@dataclass(frozen=True)
class Dendrogram:
    """The hierarchical clustering of languages.

    Attributes:
        languages: the leaves in the order in which they were given.
        linkage: scipy's linkage matrix [len(languages) - 1, 4]: two clusters, their distance, leaves below.
        root: the same as a tree.
        order: the leaves in the order in which the tree lists them: relatives side by side.
    """

    languages: tuple[str, ...]
    linkage: NDArray[np.float64]
    root: Cluster
    order: tuple[str, ...]


def feature_vector(values: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
    """Metric values of all sparse layers of a side, each normalised to sum 1, end to end: [layers * experts].

    A layer without any token stays zero.
    """
    parts = [np.asarray(layer, dtype=np.float64) for layer in values]
    return np.concatenate([layer / total if (total := layer.sum()) > 0 else layer for layer in parts])


def cluster(vectors: Mapping[str, NDArray[np.float64]], method: LinkageMethod = "ward") -> Dendrogram | None:
    """Hierarchical clustering by Euclidean distance; None for fewer than two languages.

    Args:
        vectors: language -> feature vector [layers * experts], all of one length (`feature_vector`).
        method: how the distance of two clusters follows from that of their members.
    """
    if len(vectors) < 2:
        return None
    languages = tuple(vectors)
    linkage: NDArray[np.float64] = hierarchy.linkage(np.stack(list(vectors.values())), method=method)
    nodes: list[Node] = list(languages)
    for first, second, distance, _ in linkage:
        nodes.append(Cluster(float(distance), _nearer_first(nodes[int(first)], nodes[int(second)])))
    root = nodes[-1]
    assert isinstance(root, Cluster)
    return Dendrogram(languages, linkage, root, tuple(leaves(root)))


def leaves(node: Node) -> list[str]:
    """The languages below a node, in the tree's order."""
    return [node] if isinstance(node, str) else [leaf for member in node.members for leaf in leaves(member)]


def text_tree(root: Node) -> list[str]:
    """The tree in lines of text; a number is the distance at which the branches below it join."""
    lines = [_label(root)]
    if isinstance(root, Cluster):
        for member, (branch, below) in zip(root.members, (("├─ ", "│  "), ("└─ ", "   ")), strict=True):
            first, *rest = text_tree(member)
            lines += [branch + first, *(below + line for line in rest)]
    return lines


def _label(node: Node) -> str:
    return node if isinstance(node, str) else f"{node.distance:.3f}"


def _nearer_first(first: Node, second: Node) -> tuple[Node, Node]:
    # The tighter cluster on top, single languages last.
    return (first, second) if _tightness(first) <= _tightness(second) else (second, first)


def _tightness(node: Node) -> float:
    return float("inf") if isinstance(node, str) else node.distance
