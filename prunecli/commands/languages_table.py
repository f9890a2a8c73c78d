"""The tables of `compare-languages`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from prunecli.commands import console

if TYPE_CHECKING:
    from prunecli.analysis.language_experts import Node
    from prunecli.results.languages import ExpertsPerLayer, Relation


def relations(title: str, found: Mapping[str, Mapping[str, Relation | None]]) -> console.Shown:
    """One row for each side and each thing that two pairs can have in common."""
    rows = [
        [side, relation, str(spread.comparisons), f"{spread.mean:.0%}", _range(spread)]
        for side, by_relation in found.items()
        for relation, spread in by_relation.items()
        if spread is not None
    ]
    return console.table(title, ["experts of the", "pairs with", "compared", "mean", "range"], rows, 2)


def _range(spread: Relation) -> str:
    return f"{spread.lowest:.0%} to {spread.highest:.0%}"


def triangles(
    pairs: Sequence[str], encoder: Sequence[Sequence[float]], decoder: Sequence[Sequence[float]]
) -> console.Shown:
    """Table 4: the encoder below the diagonal, the decoder above, where a source or target is shared."""
    columns = ["pair", *(str(number) for number in range(1, len(pairs) + 1))]
    rows = []
    for row, pair in enumerate(pairs):
        cells = [
            _cell(pair, other, (encoder if column < row else decoder)[row][column])
            for column, other in enumerate(pairs)
        ]
        rows.append([f"{row + 1} {pair}", *cells])
    return console.table("The same in %, encoder below the diagonal and decoder above", columns, rows)


def _cell(pair: str, other: str, value: float) -> str:
    shared = any(one == two for one, two in zip(pair.split("-"), other.split("-"), strict=True))
    return f"{100 * value:.0f}" if shared and pair != other else "-" if pair == other else ""


def tree(clusters: Mapping[str, Any]) -> list[str]:
    """The nested clusters of languages.json as lines of text."""
    from prunecli.analysis.language_experts import Cluster, text_tree

    def node(value: Mapping[str, Any] | str) -> Node:
        if isinstance(value, str):
            return value
        first, second = value["members"]
        return Cluster(value["distance"], (node(first), node(second)))

    return text_tree(node(clusters))


def experts(removed: str, found: ExpertsPerLayer) -> console.Shown:
    """Experts per layer, and in each side as a whole."""
    rows = [
        [layer, f"{mean:.1f}", f"{lowest} to {highest}"]
        for layer, mean, lowest, highest in zip(
            found.layers, found.mean, found.lowest, found.highest, strict=True
        )
    ]
    for side in dict.fromkeys(found.sides):
        means = [mean for mean, own in zip(found.mean, found.sides, strict=True) if own == side]
        rows.append([f"{side}, all layers", f"{sum(means):.1f}", ""])
    title = f"Experts per layer under the global threshold ({removed}), mean over {len(found.by_pair)} pairs"
    return console.table(title, ["layer", "experts", "range"], rows)
