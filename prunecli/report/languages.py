"""The section of languages: trees, shared experts, experts per layer."""

from __future__ import annotations

from prunecli.report.charts import Bar, bars
from prunecli.report.collect import Material
from prunecli.report.grids import Scale, heat_map, scale_key
from prunecli.report.markup import Html, counted, element, join, table
from prunecli.report.trees import dendrogram
from prunecli.results.schemas import ExpertsPerLayer, Languages, Similarities

MOST_PAIRS = 120
"""With more pairs than this, the matrices of their similarities are not drawn."""
SIDES = {"encoder": "source", "decoder": "target"}


def languages_section(material: Material) -> Html | None:
    """For each languages.json its trees, matrices and counts; None where there is none."""
    files = material.of(Languages)
    return join([_languages(name, found) for name, found in files]) if files else None


def _languages(name: str, languages: Languages) -> Html:
    said = (
        f"{counted(len(languages.pairs), 'pair')}; {languages.ratio:.0%} of the experts removed by {languages.metric}, "
        f"{languages.strategy}; clusters join by {languages.clustering.linkage} linkage."
    )
    parts = [element("h3", name), element("p", said)]
    trees = [
        dendrogram(f"Languages by the {side} experts of their {by}", tree.languages, tree.matrix)
        for (side, by), tree in zip(
            SIDES.items(), (languages.clustering.encoder, languages.clustering.decoder), strict=True
        )
        if tree is not None
    ]
    if trees:
        parts.append(element("div", *trees, class_="charts"))
    if languages.similarity is not None:
        parts += _shared(languages.similarity, languages.pairs)
    if languages.experts_per_layer is not None:
        parts.append(_per_layer(languages.experts_per_layer))
    return join(parts)


def _shared(similarity: Similarities, pairs: list[str]) -> list[Html]:
    rows = [
        [
            f"{side}, {relation}",
            f"{found.comparisons:,}",
            *(f"{v:.0%}" for v in (found.mean, found.lowest, found.highest)),
        ]
        for side, relations in similarity.relations.items()
        for relation, found in relations.items()
        if found is not None
    ]
    columns = ["experts of the side, pairs with", "compared", "mean", "lowest", "highest"]
    parts = [table("Jaccard similarity of the selected experts", columns, rows)] if rows else []
    if len(pairs) <= MOST_PAIRS:
        scale = Scale(0.0, 1.0)
        matrices = {"encoder": similarity.encoder, "decoder": similarity.decoder}
        drawn = [
            heat_map(f"Jaccard similarity, {side} experts", matrix, pairs, pairs, scale)
            for side, matrix in matrices.items()
        ]
        parts += [element("div", *drawn, class_="charts"), scale_key(scale, "0", "1")]
    return parts


def _per_layer(found: ExpertsPerLayer) -> Html:
    rows = [
        Bar(layer, mean, low, high, f"{mean:.1f} ({low:.0f} to {high:.0f})")
        for layer, mean, low, high in zip(found.layers, found.mean, found.lowest, found.highest, strict=True)
    ]
    return bars(
        "Experts that a layer keeps under the global threshold: mean and range over the pairs",
        rows,
        "experts",
    )
