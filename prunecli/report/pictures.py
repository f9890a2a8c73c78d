"""The pictures of each kind of result, for the report page and for `--plot`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, get_args

import numpy as np
from numpy.typing import NDArray

from prunecli.architectures.records import Side
from prunecli.errors import CheckpointError
from prunecli.model.attention import KIND_NAMES, KINDS, kind_and_layer
from prunecli.report.charts import (
    Bar,
    Grid,
    Picture,
    Point,
    bars,
    colour_range,
    curves,
    dendrogram,
    heat_map,
    histogram,
)
from prunecli.results.latency import Latency
from prunecli.results.similarity import Similarity, axis_title, by_kind, ends_of, stated_correlation

if TYPE_CHECKING:
    from prunecli.analysis.removed import Kept, Removed
    from prunecli.results.languages import ExpertsPerLayer, Languages, Texts, Tree
    from prunecli.results.latency import Timing
    from prunecli.results.shrinking import Shrunk
    from prunecli.results.similarity import HeadComparison

MEASURES = {"cka": "CKA", "lns": "LNS"}
MOST_PAIRS = 120
"""With more pairs, the matrices of their similarities are not drawn."""
UNIT_RANGE = (0.0, 1.0)
"""Ends of the colour scale for similarities."""


def reduction_curves(
    caption: str,
    models: Mapping[int, Point],
    lost: Mapping[int, Removed],
    titles: tuple[str, str],
    *,
    least: int = 1,
    is_joined: bool = True,
    references: Sequence[float] = (),
) -> Picture:
    """Draw a series for each way in which models were reduced.

    Args:
        caption: the title.
        models: index of a model -> its point.
        lost: index of a model -> what was removed from it; models that could not be opened have no entry.
        titles: of the two axes.
        least: a series is a line if its reduced models have at least so many different x values. A line starts at its
            original.
        is_joined: whether series may be lines at all.
        references: y values of thin horizontal lines.
    """
    members: dict[str, list[int]] = {}
    originals = [index for index in models if index in lost and lost[index].is_original]
    for index in models:
        if index in lost and index not in originals:
            members.setdefault(lost[index].lines[0] or "reduced", []).append(index)
    joined = [
        name
        for name, own in members.items()
        if is_joined and len({models[index].x for index in own}) >= least
    ]
    for index in originals:
        starts = [name for line in lost[index].lines if (name := line or "reduced") in joined]
        for name in starts or ["not reduced"]:
            members.setdefault(name, []).append(index)
    members["not in this directory"] = [index for index in models if index not in lost]
    points = [
        replace(models[index], series=name)
        for name, own in members.items()
        for index in sorted(own, key=lambda index: (models[index].x, index))
    ]
    dashed = [name for name in joined if any(lost[index].by_ablation for index in members[name])]
    return curves(caption, points, *titles, joined=joined, dashed=dashed, references=references)


def training_curves(
    caption: str,
    scores: Sequence[float],
    removed: Sequence[float],
    kept: Sequence[Kept],
    titles: tuple[str, str],
) -> Picture:
    """Draw scores against updates, each divided by the score of the unreduced model of the same step.

    There is a line for each fraction removed (1905.10650, Figure 5), without points whose unreduced model scores 0.

    Args:
        caption: the title.
        scores, removed, kept: score, fraction removed and place in the training of each model.
        titles: what was removed ("heads"), and the name of the score.
    """
    unit, score = titles
    points = [
        Point(
            one.updates,
            own / scores[one.original],
            f"{share:.0%} of {unit} removed",
            f"{share:.0%} of {unit} removed",
        )
        for own, share, one in sorted(
            zip(scores, removed, kept, strict=True), key=lambda row: (row[1], row[2].updates)
        )
        if scores[one.original] > 0
    ]
    return curves(
        caption,
        points,
        "updates",
        f"{score} / score of the unreduced model",
        joined={point.series for point in points},
        x_ticks=sorted({one.updates for one in kept}),
        y_from_zero=True,
    )


def shrink_picture(caption: str, shrunk: Shrunk) -> Picture:
    """Draw cost by size: a line for each kind of units removed alone, points for mixtures, and the choice."""
    points = []
    for one in sorted(shrunk.tried, key=lambda one: (one.stage, one.parameters)):
        shares = ", ".join(f"{kind} -{share:.0%}" for kind, share in one.shares.items())
        series = f"{next(iter(one.shares))} alone" if one.stage == "curve" else "mixtures"
        series = "chosen" if one.stage == "whole" and one.shares == shrunk.shares else series
        if one.quality.cost is not None:
            points.append(Point(one.parameters / 1e6, one.quality.cost, shares, series))
    alone = {point.series for point in points if point.series.endswith(" alone")}
    return curves(caption, points, "parameters, millions", "cost: loss, or 1 - cosine", joined=alone)


def speed_pictures(latency: Latency) -> list[Picture]:
    """Draw speed against batch size for each beam or phase (2309.01826, appendix D), bars for a single batch size."""
    settings: dict[str, list[tuple[str, Timing]]] = {}
    for result in latency.results:
        for timing in result.timings:
            settings.setdefault(timing.setting, []).append((result.checkpoint, timing))
    pictures = []
    for setting, own in settings.items():
        unit = own[0][1].rate[0]
        caption = ", ".join(filter(None, [unit.capitalize(), setting]))
        sizes = sorted({timing.batch_size for _, timing in own})
        if len(sizes) == 1:
            rows = [
                Bar(
                    name,
                    one.median,
                    one.text(1),
                    low=one.median - one.deviation,
                    high=one.median + one.deviation,
                )
                for name, timing in own
                for one in [timing.rate[1]]
            ]
            pictures.append(bars(f"{caption}; error bars: one deviation", rows, unit))
            continue
        points = [
            Point(
                timing.batch_size,
                one.median,
                f"{name}, batch {timing.batch_size}",
                name,
                one.median - one.deviation,
                one.median + one.deviation,
            )
            for name, timing in sorted(own, key=lambda row: row[1].batch_size)
            for one in [timing.rate[1]]
        ]
        options = {"joined": {name for name, _ in own}, "x_ticks": sizes, "y_from_zero": True}
        pictures.append(curves(f"{caption}, against batch size", points, "batch size", unit, **options))
    return pictures


def experts_per_layer(layers: ExpertsPerLayer) -> Picture:
    """Draw the experts that each layer keeps under the global threshold (2212.09811, Figure 1)."""
    rows = [
        Bar(
            layer.removeprefix("model.").replace(".layers.", " ").removesuffix(".ffn"),
            mean,
            f"{mean:.1f} ({low:.0f} to {high:.0f})",
            low=low,
            high=high,
        )
        for layer, mean, low, high in zip(
            layers.layers, layers.mean, layers.lowest, layers.highest, strict=True
        )
    ]
    return bars(
        "Experts kept by each layer under the global threshold: mean and range over the pairs",
        rows,
        "experts",
    )


def trees(clusters: Mapping[str, Tree | None], families: dict[str, str]) -> list[Picture]:
    """Draw a dendrogram for each title with a tree (2212.09811, Figures 3 and 7)."""
    return [
        dendrogram(title, tree.leaves, tree.matrix, families)
        for title, tree in clusters.items()
        if tree is not None
    ]


def similarity_map(caption: str, matrix: Grid, names: Sequence[str]) -> Picture:
    """Draw a matrix of similarities of `names` with each other."""
    return heat_map(caption, matrix, names, names, UNIT_RANGE)


def language_pictures(languages: Languages) -> list[list[Picture]]:
    """Draw the trees, the similarities of pairs if there are few, and the experts of each layer."""
    clusters, similarity = languages.clustering, languages.similarity
    by_side = {
        "Languages by the encoder experts of their source": clusters.encoder,
        "Languages by the decoder experts of their target": clusters.decoder,
    }
    sides = {} if similarity is None else {"encoder": similarity.encoder, "decoder": similarity.decoder}
    maps = [
        similarity_map(f"Jaccard similarity, {side} experts", matrix, languages.pairs)
        for side, matrix in sides.items()
        if matrix is not None and len(languages.pairs) <= MOST_PAIRS
    ]
    layers = languages.experts_per_layer
    return [trees(by_side, languages.families), maps, [] if layers is None else [experts_per_layer(layers)]]


def text_pictures(texts: Texts) -> list[list[Picture]]:
    """Draw the tree and the similarities of texts."""
    shared = similarity_map("Jaccard similarity of the selected experts", texts.similarity, texts.texts)
    return [[*trees({"Texts by their experts": texts.clustering}, texts.families), shared]]


def head_maps(
    model_type: str, values: Mapping[str, Mapping[int, float]], counted: str | None = None
) -> list[Picture]:
    """Draw a heat map for each kind of attention, layers by heads, all with one colour scale.

    Args:
        model_type: of the model, which tells the kind and the layer of an attention.
        values: attention -> original id of a head -> its value. Pruned heads have no value.
        counted: if given, what the values are, for a histogram of all heads (1905.10650, Figure 1).
    """
    grouped: dict[str, list[tuple[int, str]]] = {}
    for attention in values:
        kind, layer = kind_and_layer(model_type, attention)
        grouped.setdefault(kind, []).append((layer, attention))
    names, grids, rows = [], [], []
    for kind in sorted(grouped, key=lambda kind: [*KINDS, kind].index(kind)):
        layers = [(layer, values[attention]) for layer, attention in sorted(grouped[kind])]
        heads = range(1 + max((head for _, own in layers for head in own), default=-1))
        if heads:
            names.append(KIND_NAMES.get(kind, kind))
            grids.append([[own.get(head) for head in heads] for _, own in layers])
            rows.append([str(layer) if kind in KIND_NAMES else name for layer, name in sorted(grouped[kind])])
    ends = colour_range(grids)
    pictures = [
        heat_map(name, grid, own, [*map(str, range(len(grid[0])))], ends, titles=("layer", "head"))
        for name, grid, own in zip(names, grids, rows, strict=True)
    ]
    if counted is not None and grids:
        drawn = {
            name: [value for row in grid for value in row if value is not None]
            for name, grid in zip(names, grids, strict=True)
        }
        pictures.append(histogram(f"Number of heads by {counted}", drawn, counted, "heads"))
    return pictures


def head_comparison(comparison: HeadComparison) -> Picture:
    """Draw a point for each head: its importance in both files (1905.10650, Figure 2)."""
    stated = {one.of: one for one in comparison.correlations}
    points = [
        Point(
            head.first,
            head.second,
            f"layer {head.layer}, head {head.head}",
            f"{KIND_NAMES.get(kind, kind)}{stated_correlation(stated.get(kind))}",
        )
        for kind, heads in by_kind(comparison.heads)
        for head in heads
    ]
    caption = f"Importance of {len(points)} heads{stated_correlation(stated.get('all'))}"
    titles = axis_title(comparison.first), axis_title(comparison.second)
    return curves(caption, points, *titles, references=[0.0])


def component_maps(similarity: Similarity) -> list[list[Picture]]:
    """Draw rows of heat maps of components (2309.01826, Figure 1), components of one side in each.

    With two models, there is a row for each measure and side: each model by itself, then both. With one model, there is
    a row for each measure. A name is layer.kind: sa, ca, ffn.
    """
    models = dict(zip(("first", "second"), similarity.checkpoints, strict=False))
    rows: list[list[Picture]] = []
    for measure, matrices in similarity.matrices.items():
        by_side = []
        for side in get_args(Side):
            maps = []
            for which in ("first", "second", "between"):
                down, across = (
                    [
                        (i, part.label)
                        for i, part in enumerate(similarity.components.get(end, []))
                        if part.side == side
                    ]
                    for end in ends_of(which)
                )
                if which not in matrices or not down or not across:
                    continue
                names = tuple(models.get(end, end) for end in ends_of(which))
                title = f"{MEASURES.get(measure, measure)}, {side}: {' and '.join(dict.fromkeys(names))}"
                grid = [[matrices[which][row][column] for column, _ in across] for row, _ in down]
                labels = [label for _, label in down], [label for _, label in across]
                maps.append(
                    heat_map(
                        title, grid, *labels, UNIT_RANGE, titles=names if len(set(names)) > 1 else ("", "")
                    )
                )
            by_side.append(maps)
        rows += by_side if "between" in matrices else [[picture for maps in by_side for picture in maps]]
    return [row for row in rows if row]


def correlation_maps(rows: Sequence[Mapping[str, NDArray[np.float64]]]) -> list[list[Picture]]:
    """Draw correlation maps (1911.12385, Figures 4 and 7 to 11): name -> map [size, size] for each row."""
    return [
        [
            heat_map(
                f"{name}; mean beside the diagonal {mean_correlation(values):.3f}",
                values.tolist(), *([str(number) for number in range(len(values))],) * 2, UNIT_RANGE,
            )
            for name, values in maps.items()
        ]
        for maps in rows
        if maps
    ]  # fmt: skip


def correlation_map(chunks: Iterable[NDArray[np.generic]]) -> NDArray[np.float64]:
    """The map [m, m] of a table that comes in slices of rows [rows, m]; one pass, summed in float64 (1911.12385, B).

    M = E^T E, normalised between 0 and 1: the identity where all dimensions are independent. The paper does not say
    how it normalises; here |M_ij| is divided by sqrt(M_ii M_jj), the absolute cosine of the two columns. Columns are
    not centred.

    A dimension that is 0 in every row is independent of all others: 0 beside the diagonal, 1 on it.

    Raises:
        CheckpointError: a value that is not finite.
    """
    products = np.zeros(())
    for chunk in chunks:
        rows = np.asarray(chunk).astype(np.float64)
        products = products + rows.T @ rows
    if not np.isfinite(products).all():
        raise CheckpointError(
            "The embedding table holds a value that is not finite", "Copy the checkpoint again."
        )
    lengths = np.sqrt(products.diagonal())
    lengths[lengths == 0] = 1
    found: NDArray[np.float64] = np.minimum(np.abs(products / np.outer(lengths, lengths)), 1)
    np.fill_diagonal(found, 1)
    return found


def mean_correlation(found: NDArray[np.float64]) -> float:
    """Mean of a map beside its diagonal: 0 where all dimensions are independent, 1 where all are the same."""
    size = len(found)
    return float((found.sum() - found.trace()) / (size * (size - 1))) if size > 1 else 0.0


def group_correlations(found: NDArray[np.float64], groups: int) -> NDArray[np.float64]:
    """Mean correlation of each two groups of a layer (Figure 11), of its map [k, k]: [groups, groups].

    On the diagonal that of a group's dimensions with each other, without themselves. Groups are equal parts, in order.
    """
    width = len(found) // groups
    blocks = found.reshape(groups, width, groups, width).mean(axis=(1, 3))
    parts = [slice(start, start + width) for start in range(0, len(found), width)]
    np.fill_diagonal(blocks, [mean_correlation(found[part, part]) for part in parts])
    return np.asarray(blocks, np.float64)
