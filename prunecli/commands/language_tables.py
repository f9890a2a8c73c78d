"""What `compare-languages` shows of languages: tables, trees, a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from prunecli.commands import console
from prunecli.errors import PruneError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from prunecli.results.languages import ExpertsPerLayer, Languages, Relation

TABLE_PAIRS = 12
"""With more pairs than this, their similarities are summed up in the terminal, not listed."""


def show_languages(languages: Languages) -> None:
    """Similarities, trees, and experts of each layer."""
    removed = f"{languages.ratio:.0%} of the experts removed by {languages.metric}"
    similarity = languages.similarity
    if similarity is not None:
        title = f"Jaccard similarity of the selected experts ({removed}, {languages.strategy})"
        console.show(_relations(title, similarity.relations))
        encoder, decoder = similarity.encoder, similarity.decoder
        if len(languages.pairs) <= TABLE_PAIRS and encoder is not None and decoder is not None:
            console.show(_triangles(languages.pairs, encoder, decoder))
        else:
            console.out(f"{len(languages.pairs)} pairs; --langs A,B,C lists those between a few languages.\n")
    clusters = languages.clustering
    for side, tree in (("encoder by source", clusters.encoder), ("decoder by target", clusters.decoder)):
        if tree is not None:
            console.out(f"Clusters of languages, {side} ({clusters.linkage} linkage)")
            console.out("\n".join(tree.lines) + "\n")
    if languages.experts_per_layer is not None:
        removed = f"{languages.ratio:.0%} of the experts removed by {languages.experts_per_layer.metric}"
        console.show(_experts(removed, languages.experts_per_layer))
        if languages.experts_per_layer.by_group:
            console.show(_by_group(languages.experts_per_layer))


def _relations(title: str, by_side: Mapping[str, Mapping[str, Relation | None]]) -> console.Shown:
    """One row for each side and each thing that two pairs can have in common."""
    rows = [
        [side, relation, str(spread.comparisons), f"{spread.mean:.0%}", _range(spread)]
        for side, by_relation in by_side.items()
        for relation, spread in by_relation.items()
        if spread is not None
    ]
    return console.table(title, ["experts of the", "pairs with", "compared", "mean", "range"], rows, 2)


def _range(spread: Relation) -> str:
    return f"{spread.lowest:.0%} to {spread.highest:.0%}"


def _triangles(
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
    shared = any(first == second for first, second in zip(pair.split("-"), other.split("-"), strict=True))
    return f"{100 * value:.0f}" if shared and pair != other else "-" if pair == other else ""


def _experts(removed: str, layers: ExpertsPerLayer) -> console.Shown:
    """Experts per layer, and in each side as a whole."""
    rows = [
        [layer, f"{mean:.1f}", f"{lowest} to {highest}"]
        for layer, mean, lowest, highest in zip(
            layers.layers, layers.mean, layers.lowest, layers.highest, strict=True
        )
    ]
    for side in dict.fromkeys(layers.sides):
        means = [mean for mean, own in zip(layers.mean, layers.sides, strict=True) if own == side]
        rows.append([f"{side}, all layers", f"{sum(means):.1f}", ""])
    title = f"Experts per layer under the global threshold ({removed}), mean over {len(layers.by_pair)} pairs"
    return console.table(title, ["layer", "experts", "range"], rows)


def _by_group(layers: ExpertsPerLayer) -> console.Shown:
    """One row per group of sources and group of targets: experts of each side (Table 16)."""
    rows = [
        [group.source, group.target, str(group.pairs), f"{group.encoder:.1f}", f"{group.decoder:.1f}"]
        for group in layers.by_group
    ]
    columns = ["from", "to", "pairs", "encoder", "decoder"]
    return console.table("The same by group of languages: experts of a side", columns, rows, 2)


def plot_languages(
    path: Path, languages: Languages, similarity: Mapping[str, NDArray[np.float64]] | None
) -> None:
    """Draw trees, experts per layer and similarities.

    Args:
        path: file to write.
        languages: the result.
        similarity: side -> `[pairs, pairs]`. The map has the encoder below the diagonal and the decoder above.

    Raises:
        PruneError: there is nothing to draw.
    """
    from prunecli.analysis.language_experts import two_triangles
    from prunecli.report.pictures import experts_per_layer, similarity_map, trees
    from prunecli.report.render import save_pictures

    clusters, layers = languages.clustering, languages.experts_per_layer
    by_side = {
        "Encoder experts, by source language": clusters.encoder,
        "Decoder experts, by target language": clusters.decoder,
    }
    pictures = trees(by_side, languages.families)
    if layers is not None:
        pictures.append(experts_per_layer(layers))
    if similarity is not None:
        triangles = two_triangles(similarity["encoder"], similarity["decoder"])
        caption = "Jaccard similarity: encoder below the diagonal, decoder above"
        pictures.append(similarity_map(caption, triangles.tolist(), languages.pairs))
    if not pictures:
        raise PruneError("There is nothing to draw: the statistics hold fewer than two languages.")
    save_pictures([pictures[:2], pictures[2:]], path)
