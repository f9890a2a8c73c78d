"""The sections of comparisons: which languages use the same experts, what components of models compute alike."""

from __future__ import annotations

from prunecli.report.charts import Bar, bars
from prunecli.report.grids import Scale, heat_map, scale_key
from prunecli.report.markup import Html, element, join, maybe, row_of, table
from prunecli.report.trees import dendrogram
from prunecli.results.languages import ExpertsPerLayer, Languages, Similarities, Texts
from prunecli.results.similarity import Similarity, ends_of
from prunecli.tensors.quantities import counted

MOST_PAIRS = 120
"""With more pairs than this, the matrices of their similarities are not drawn."""
UNIT = Scale(0.0, 1.0)
"""Of similarities."""
MEASURES = {"cka": "CKA", "lns": "LNS"}


def texts_part(name: str, texts: Texts) -> Html:
    """The tree, matrix and experts by layer of a texts.json."""
    said = f"{counted(len(texts.texts), 'text')}; {texts.ratio:.0%} of the experts removed by {texts.metric}."
    tree, names = texts.clustering, texts.texts
    trees = (
        []
        if tree is None
        else [dendrogram("Texts by their experts", tree.texts, tree.matrix, texts.families)]
    )
    shared = heat_map("Jaccard similarity of the selected experts", texts.similarity, names, names, UNIT)
    own = {f"only {text}": lambda row, text=text: str(len(row.own.get(text, []))) for text in names}
    columns = {"layer": lambda row: row.layer, "all texts": lambda row: str(len(row.common)), **own}
    return join(
        [
            element("h3", name),
            element("p", said),
            row_of(*trees, shared),
            scale_key(UNIT, "0", "1"),
            table("Experts of each layer that texts select", texts.layers, columns),
        ]
    )


def languages_part(name: str, languages: Languages) -> Html:
    """Trees, matrices and counts of a languages.json."""
    clustering = languages.clustering
    said = (
        f"{counted(len(languages.pairs), 'pair')}; {languages.ratio:.0%} of the experts removed by {languages.metric}, "
        f"{languages.strategy}; clusters join by {clustering.linkage} linkage."
    )
    trees = [
        dendrogram(
            f"Languages by the {side} experts of their {by}",
            tree.languages,
            tree.matrix,
            languages.families,
        )
        for side, by, tree in (
            ("encoder", "source", clustering.encoder),
            ("decoder", "target", clustering.decoder),
        )
        if tree is not None
    ]
    return join(
        [
            element("h3", name),
            element("p", said),
            *([row_of(*trees)] if trees else []),
            *([] if languages.similarity is None else _shared(languages.similarity, languages.pairs)),
            *([] if languages.experts_per_layer is None else [_per_layer(languages.experts_per_layer)]),
        ]
    )


def _shared(similarity: Similarities, pairs: list[str]) -> list[Html]:
    rows = [
        (side, name, relation)
        for side, relations in similarity.relations.items()
        for name, relation in relations.items()
        if relation is not None
    ]
    parts = []
    if rows:
        parts = [
            table(
                "Jaccard similarity of the selected experts",
                rows,
                {
                    "experts of the side, pairs with": lambda row: f"{row[0]}, {row[1]}",
                    "compared": lambda row: f"{row[2].comparisons:,}",
                    "mean": lambda row: f"{row[2].mean:.0%}",
                    "lowest": lambda row: f"{row[2].lowest:.0%}",
                    "highest": lambda row: f"{row[2].highest:.0%}",
                },
            )
        ]
    if len(pairs) <= MOST_PAIRS and similarity.encoder is not None:
        maps = (
            heat_map(f"Jaccard similarity, {side} experts", matrix, pairs, pairs, UNIT)
            for side, matrix in (("encoder", similarity.encoder), ("decoder", similarity.decoder))
            if matrix is not None
        )
        parts += [row_of(*maps), scale_key(UNIT, "0", "1")]
    return parts


def _per_layer(experts: ExpertsPerLayer) -> Html:
    rows = [
        Bar(layer, mean, low, high, f"{mean:.1f} ({low:.0f} to {high:.0f})")
        for layer, mean, low, high in zip(
            experts.layers, experts.mean, experts.lowest, experts.highest, strict=True
        )
    ]
    caption = "Experts that a layer keeps under the global threshold: mean and range over the pairs"
    return bars(caption, rows, "experts")


def similarity_part(name: str, similarity: Similarity) -> Html:
    """Maps and means of a similarity.json."""
    said = f"{' and '.join(similarity.checkpoints[:2])} on {_text(similarity)}."
    if similarity.benchmarks:
        said += f" Benchmarks: {', '.join(similarity.benchmarks)}."
    parts = [element("h3", name), element("p", said)]
    if similarity.mean:
        pairing = "corresponding" if len(similarity.checkpoints) > 1 else "successive"
        columns = dict.fromkeys(column for means in similarity.mean.values() for column in means)
        cells = {
            _title(column): lambda row, column=column: maybe(_digits(column).format, row[1].get(column))
            for column in columns
        }
        parts.append(
            table(
                f"Mean over {pairing} components",
                list(similarity.mean.items()),
                {"side": lambda row: row[0]} | cells,
            )
        )
    for measure, matrices in similarity.matrices.items():
        maps = (_map(similarity, measure, which) for which in matrices if matrices[which])
        parts.append(row_of(*maps))
    return join([*parts, scale_key(UNIT, "0", "1")])


def _map(similarity: Similarity, measure: str, which: str) -> Html:
    ends = ends_of(which)
    rows, columns = (
        [f"{part.side[:1]}{part.label}" for part in similarity.components.get(end, [])] for end in ends
    )
    names = dict(zip(("first", "second"), similarity.checkpoints, strict=False))
    first, second = (names.get(end, end) for end in ends)
    whose = f"{first} (down) and {second} (across)" if which == "between" else f"components of {first}"
    caption = f"{MEASURES.get(measure, measure)}: {whose}"
    return heat_map(caption, similarity.matrices[measure][which], rows, columns, UNIT)


def _text(similarity: Similarity) -> str:
    names = [str(text.get("name")) for text in similarity.text]
    if not names:
        return "text that the file does not name"
    return ", ".join(names[:4]) + ("…" if len(names) > 4 else "")


def _title(column: str) -> str:
    measure, _, normalised = column.partition("_")
    return f"{MEASURES.get(measure, measure)}{', % of the benchmark' if normalised else ''}"


def _digits(column: str) -> str:
    return "{:.1f}" if column.endswith("_normalised") else "{:.3f}"
