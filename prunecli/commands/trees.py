"""Trees of clusters in the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prunecli.analysis.language_experts import Node


def tree_lines(clusters: Mapping[str, Any]) -> list[str]:
    """Nested clusters, as languages.json and texts.json have them, as lines of text."""
    from prunecli.analysis.language_experts import Cluster, text_tree

    def node(value: Mapping[str, Any] | str) -> Node:
        if isinstance(value, str):
            return value
        first, second = value["members"]
        return Cluster(value["distance"], (node(first), node(second)))

    return text_tree(node(clusters))
