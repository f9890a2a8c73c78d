"""The pictures of each kind of result, for the report page and for `--plot`."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import singledispatch
from itertools import chain
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from prunecli.analysis.removed import Removed, removed, steps_of_one_training
from prunecli.architectures.records import Side
from prunecli.errors import CheckpointError
from prunecli.model.axes import module_of
from prunecli.model.checkpoint import open_model
from prunecli.model.decision import Floats
from prunecli.model.parts import KIND_NAMES, KINDS, kind_and_layer
from prunecli.report.charts import (
    Bar,
    Picture,
    Point,
    bars,
    colour_range,
    curves,
    dendrogram,
    heat_map,
    histogram,
)
from prunecli.results.evaluation import SCORES, Evaluation
from prunecli.results.gates import GateStatistics
from prunecli.results.languages import SIDES, Languages, Texts, Tree
from prunecli.results.latency import Latency, Timing
from prunecli.results.rewriting import Shrunk, Training
from prunecli.results.similarity import (
    HeadComparison,
    Similarity,
    axis_title,
    by_kind,
    ends_of,
    stated_correlation,
)
from prunecli.results.unit_scores import Scores

MOST_PAIRS = 120
"""With more pairs, the matrices of their similarities are not drawn."""
MOST_POINTS = 300
"""A longer training log is thinned to at most so many points."""
DRAWN = {
    "translation": ("chrf++", "bleu"),
    "lm": ("perplexity", "kl_divergence"),
    "mlm": ("loss",),
    "classification": ("accuracy",),
    "embedding": ("cosine", "spearman", "retrieval"),
}
"""Task -> scores that have a panel each."""
Rows = Iterator[list[Picture]]
"""Rows of pictures, for the page and for `--plot`."""


def reduction_curves(
    caption: str,
    models: Sequence[tuple[Point, Removed | None]],
    titles: tuple[str, str],
    *,
    least: int = 1,
    is_joined: bool = True,
    references: Sequence[float] = (),
) -> Picture:
    """Draw a line for each way in which models were reduced.

    Args:
        caption: the title.
        models: the point of each model, and what was removed from it; None for a model that could not be opened.
        titles: of the two axes.
        least: different x values of its reduced models that a line needs; it starts at its original. Models that are on
            no line are points of one colour.
        is_joined: whether there are lines at all.
        references: y values of thin horizontal lines.
    """
    lines: dict[str, list[tuple[Point, Removed]]] = {}
    known = [(point, lost) for point, lost in models if lost is not None]
    for point, lost in sorted(known, key=lambda model: model[0].x):
        for line in lost.lines:
            lines.setdefault(line or "reduced", []).append((point, lost))
    joined = {
        line: [point for point, _ in own]
        for line, own in lines.items()
        if is_joined and len({point.x for point, lost in own if not lost.is_original}) >= least
    }
    others = [point for point, _ in models if not any(point in own for own in joined.values())]
    points = [
        replace(point, series=name)
        for name, own in {**joined, "other models": others}.items()
        for point in own
    ]
    return curves(caption, points, *titles, joined=joined, references=references)


def training_curves(
    caption: str,
    scores: Sequence[float],
    removed: Sequence[float],
    steps: Sequence[tuple[int, int]],
    titles: tuple[str, str],
) -> Picture:
    """Draw scores against updates, each divided by the score of the unreduced model of the same step.

    There is a line for each fraction removed (1905.10650, Figure 5), without points whose unreduced model scores 0.

    Args:
        caption: the title.
        scores, removed, steps: score, fraction removed, and updates and number of the original of each model.
        titles: what was removed ("heads"), and the name of the score.
    """
    unit, score = titles
    points = []
    for share, (updates, original), own in sorted(zip(removed, steps, scores, strict=True)):
        name = f"{share:.0%} of {unit} removed"
        if scores[original] > 0:
            points.append(Point(updates, own / scores[original], name, name))
    return curves(
        caption,
        points,
        "updates",
        f"{score} / score of the unreduced model",
        x_ticks=sorted({updates for updates, _ in steps}),
        y_from_zero=True,
    )


def evaluation_pictures(evaluation: Evaluation, checkpoints: Mapping[str, Path]) -> list[Picture]:
    """Draw the scores by what was removed; `checkpoints` are the directories of the labels."""
    results = evaluation.results
    opened = [open_model(checkpoints[result.checkpoint]) for result in results]
    unit, lost = removed(opened)
    fractions = [one.fraction for one in lost]
    steps = steps_of_one_training(opened, fractions)
    pictures = []
    for name in DRAWN[evaluation.task]:
        title = SCORES[evaluation.task][name].title
        if evaluation.task != "translation" and any(name not in own.scores for own in results[1:] or results):
            continue
        # The first checkpoint has no divergence.
        scores = [float(result.main.get(name, 0.0)) for result in results]
        if steps is not None:
            caption = f"{title} through the training"
            pictures.append(training_curves(caption, scores, fractions, steps, (unit, title)))
            continue
        models = [
            (Point(100 * one.fraction, score, result.checkpoint), one)
            for one, score, result in zip(lost, scores, results, strict=True)
        ]
        wholes = [score for score, one in zip(scores, lost, strict=True) if one.is_original]
        axes, caption = (f"% of {unit} removed", title), f"{title} against the {unit} removed"
        pictures.append(reduction_curves(caption, models, axes, references=wholes))
    return pictures


@singledispatch
def pictures_of(_result: Any) -> Rows:
    """Yield rows of pictures of a result, for the page and for `--plot`."""
    yield from ()


@pictures_of.register
def _shrinking(shrunk: Shrunk) -> Rows:
    """Draw cost by size: a line for each kind of units removed alone, points for mixtures, and the choice."""
    points = []
    for one in sorted(shrunk.tried, key=lambda one: (one.stage, one.parameters)):
        shares = ", ".join(f"{kind} -{share:.0%}" for kind, share in one.shares.items())
        series = f"{next(iter(one.shares))} alone" if one.stage == "curve" else "mixtures"
        series = "chosen" if one.stage == "whole" and one.shares == shrunk.shares else series
        if one.quality.cost is not None:
            points.append(Point(one.parameters / 1e6, one.quality.cost, shares, series))
    alone = {point.series for point in points if point.series.endswith(" alone")}
    titles = "parameters, millions", "cost: loss, or 1 - cosine"
    yield [curves(f"What was tried for {shrunk.output}", points, *titles, joined=alone)]


@pictures_of.register
def _speed(latency: Latency) -> Rows:
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
        speeds = [(name, timing.batch_size, timing.rate[1]) for name, timing in own]
        if len(sizes) == 1:
            rows = [Bar(name, one.median, one.text(1), "", *one.ends) for name, _, one in speeds]
            pictures.append(bars(f"{caption}; error bars: one deviation", rows, unit))
            continue
        points = [
            Point(size, one.median, f"{name}, batch {size}", name, *one.ends)
            for name, size, one in sorted(speeds, key=lambda row: row[1])
        ]
        caption = f"{caption}, against batch size"
        pictures.append(curves(caption, points, "batch size", unit, x_ticks=sizes, y_from_zero=True))
    yield pictures


def trees(clusters: Mapping[str, Tree | None], families: dict[str, str]) -> list[Picture]:
    """Draw a dendrogram for each title with a tree (2212.09811, Figures 3 and 7)."""
    return [
        dendrogram(title, tree.leaves, tree.matrix, families)
        for title, tree in clusters.items()
        if tree is not None
    ]


@pictures_of.register
def _languages(languages: Languages) -> Rows:
    """Draw the trees, the similarities of pairs if there are few, and the experts of each layer.

    Figures 1, 3 and 7 of 2212.09811.
    """
    clusters, pairs = languages.clustering, languages.pairs
    by_side = {
        "Languages by the encoder experts of their source": clusters.encoder,
        "Languages by the decoder experts of their target": clusters.decoder,
    }
    yield trees(by_side, languages.families)
    yield [
        heat_map(f"Jaccard similarity, {side} experts", pd.DataFrame(matrix, pairs, pairs))
        for side in SIDES
        if (matrix := getattr(languages.similarity, side, None)) is not None and len(pairs) <= MOST_PAIRS
    ]
    if (layers := languages.experts_per_layer) is not None:
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
        caption = "Experts kept by each layer under the global threshold: mean and range over the pairs"
        yield [bars(caption, rows, "experts")]


@pictures_of.register
def _texts(texts: Texts) -> Rows:
    """Draw the tree and the similarities of texts."""
    shared = pd.DataFrame(texts.similarity, texts.texts, texts.texts)
    yield [
        *trees({"Texts by their experts": texts.clustering}, texts.families),
        heat_map("Jaccard similarity of the selected experts", shared),
    ]


@pictures_of.register
def _gates(statistics: GateStatistics) -> Rows:
    """Draw how often each expert is ranked first."""
    sums = statistics.combined(statistics.entries)
    tokens = np.where(sums.tokens > 0, sums.tokens, np.nan)
    frame = pd.DataFrame(sums.top1, statistics.layers).div(tokens, axis=0)
    entry = "text" if statistics.mode == "text" else "pair"
    caption = f"Share of a layer's tokens that rank an expert first, over all {entry}s"
    yield [heat_map(caption, frame, colour_range([frame]), titles=("", "expert"))]


@pictures_of.register
def _training(training: Training) -> Rows:
    """Draw the loss of training and validation text, and chrF++ of validation text, by updates."""
    losses = [
        Point(step.step, step.loss, name, name)
        for name, steps in (("training", training.training), ("validation", training.validation))
        for step in steps[:: max(1, -(-len(steps) // MOST_POINTS))]
    ]
    scores = [
        Point(step.step, step.chrf, "validation", "chrF++")
        for step in training.validation
        if step.chrf is not None
    ]
    yield [
        curves(f"{caption} of {training.output}", points, "update", title)
        for caption, title, points in (("Loss", "loss", losses), ("chrF++", "chrF++", scores))
        if points
    ]


@pictures_of.register
def _heads(scores: Scores) -> Rows:
    """Draw the importance of heads, or the score with each head alone in its layer."""
    drawn = scores.means() if scores.method == "all-but-one" else scores.importance()
    if scores.kind == "head":
        yield head_maps(scores, drawn)


def head_maps(scores: Scores, values: Mapping[str, Floats], counted: str | None = None) -> list[Picture]:
    """Draw a heat map for each kind of attention, layers by original ids of heads, all with one colour scale.

    Args:
        scores: the scores of heads, which name the model type and the heads.
        values: axis -> a value for each head.
        counted: if given, what the values are, for a histogram of all heads (1905.10650, Figure 1).
    """
    rows: dict[str, dict[tuple[int, str], pd.Series]] = {}
    for axis, own in values.items():
        attention = module_of(axis)
        kind, layer = kind_and_layer(attention)
        rows.setdefault(kind, {})[layer, attention] = pd.Series(own, scores.ids[axis], float)
    frames = {}
    for kind in sorted(rows, key=lambda kind: [*KINDS, kind].index(kind)):
        frame = pd.DataFrame(rows[kind]).sort_index().T.sort_index()
        if frame.size:
            names = frame.index.get_level_values(0 if kind in KIND_NAMES else 1)
            frames[KIND_NAMES.get(kind, kind)] = frame.set_axis(names)
    ends = colour_range(frames.values())
    pictures = [heat_map(name, frame, ends, titles=("layer", "head")) for name, frame in frames.items()]
    if counted is not None and frames:
        drawn = {name: frame.to_numpy()[frame.notna()].tolist() for name, frame in frames.items()}
        pictures.append(histogram(f"Number of heads by {counted}", drawn, counted, "heads"))
    return pictures


@pictures_of.register
def _head_comparison(comparison: HeadComparison) -> Rows:
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
    yield [curves(caption, points, *titles, joined=(), references=[0.0])]


@pictures_of.register
def _components(similarity: Similarity) -> Rows:
    """Draw rows of heat maps of components (2309.01826, Figure 1), components of one side in each.

    With two models, there is a row for each measure and side: each model by itself, then both. With one model, there is
    a row for each measure. A name is layer.kind: sa, ca, ffn.
    """
    models = dict(zip(("first", "second"), similarity.checkpoints, strict=False))
    for measure, matrices in similarity.matrices.items():
        by_side = []
        for side in get_args(Side):
            maps = []
            for which, matrix in matrices.items():
                ends = [similarity.components[end] for end in ends_of(which)]
                down, across = ([part.side == side for part in parts] for parts in ends)
                labels = [[part.label for part in parts] for parts in ends]
                frame = pd.DataFrame(matrix, *labels).loc[down, across]
                if frame.size:
                    names = tuple(models.get(end, end) for end in ends_of(which))
                    single = dict.fromkeys(names)
                    title = f"{measure.upper()}, {side}: {' and '.join(single)}"
                    titles = names if len(single) > 1 else ("", "")
                    maps.append(heat_map(title, frame, titles=titles))
            by_side.append(maps)
        yield from by_side if "between" in matrices else [[*chain(*by_side)]]


def correlation_maps(rows: Sequence[Mapping[str, Floats]]) -> list[list[Picture]]:
    """Draw correlation maps (1911.12385, Figures 4 and 7 to 11): name -> map [size, size] for each row."""
    return [
        [
            heat_map(
                f"{name}; mean beside the diagonal {mean_correlation(values):.3f}",
                pd.DataFrame(values),
            )
            for name, values in maps.items()
        ]
        for maps in rows
    ]


def correlation_map(chunks: Iterable[NDArray[np.generic]]) -> Floats:
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
    found: Floats = np.minimum(np.abs(products / np.outer(lengths, lengths)), 1)
    np.fill_diagonal(found, 1)
    return found


def mean_correlation(found: Floats) -> float:
    """Mean of a map beside its diagonal: 0 where all dimensions are independent, 1 where all are the same."""
    size = len(found)
    return float((found.sum() - found.trace()) / (size * (size - 1))) if size > 1 else 0.0


def group_correlations(found: Floats, groups: int) -> Floats:
    """Mean correlation of each two groups of a layer (Figure 11), of its map [k, k]: [groups, groups].

    On the diagonal that of a group's dimensions with each other, without themselves. Groups are equal parts, in order.
    """
    width = len(found) // groups
    blocks = found.reshape(groups, width, groups, width).mean(axis=(1, 3))
    parts = [slice(start, start + width) for start in range(0, len(found), width)]
    np.fill_diagonal(blocks, [mean_correlation(found[part, part]) for part in parts])
    return np.asarray(blocks, np.float64)
