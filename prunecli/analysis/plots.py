"""Figures as PNG: what all share, lines and bars, and those of languages; heat maps are in `heat_maps`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from prunecli.errors import PruneError
from prunecli.tensors.transaction import new_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Item = TypeVar("Item")
PANEL = 6.5, 4.5
"""Inches of a panel of lines."""
NAMED_PAIRS = 30
"""With more pairs than this, the similarities are drawn without names."""


def require_matplotlib() -> None:
    """Refuse before the work what could not be drawn after it.

    Raises:
        PruneError: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise PruneError(
            "A plot needs matplotlib, which is not installed.", "Install it: pip install matplotlib."
        ) from error


def new_figure(
    width: float, height: float, rows: int = 1, columns: int = 1, title: str | None = None
) -> tuple[Figure, list[list[Any]]]:
    """A figure of so many inches, and its axes `[rows][columns]`.

    Raises:
        PruneError: matplotlib is not installed.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    if title is not None:
        figure.suptitle(title)
    axes: list[list[Any]] = figure.subplots(rows, columns, squeeze=False).tolist()
    return figure, axes


def filled(grid: Sequence[Sequence[Any]], rows: Sequence[Sequence[Item]]) -> Iterator[tuple[Any, Item]]:
    """The axes of each item, row by row; axes that a row lacks an item for are hidden."""
    for row_axes, row in zip(grid, rows, strict=True):
        yield from zip(row_axes, row, strict=False)
        for unused in row_axes[len(row) :]:
            unused.set_visible(False)


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure as a PNG, whole or not at all."""
    with new_file(path) as partial:
        # Without the version of matplotlib: equal inputs make equal bytes.
        figure.savefig(partial, format="png", dpi=120, metadata={"Software": None})


def hide_spines(axes: Any, *sides: str) -> None:
    """Leave these sides of a panel without a line."""
    for side in sides:
        axes.spines[side].set_visible(False)


@dataclass(frozen=True)
class CurvePoint:
    """One model of a curve.

    Attributes:
        removed: fraction of the heads, experts or parameters that it lost, in [0, 1].
        scores: what was measured of it, such as {"chrF++": 51.2}; the same names for all points.
        lines: the curves that it is a point of.
        is_original: whether they start from it.
        is_dashed: whether a line that ends in it is dashed.
    """

    removed: float
    scores: Mapping[str, float]
    lines: tuple[str, ...] = ("",)
    is_original: bool = False
    is_dashed: bool = False


def curves(points: Sequence[CurvePoint]) -> dict[str, list[CurvePoint]]:
    """Line -> its points by what was removed."""
    names = dict.fromkeys(line for point in points for line in point.lines)
    return {
        name: sorted((p for p in points if name in p.lines), key=lambda point: point.removed)
        for name in names
    }


def score_figure(points: Sequence[CurvePoint], *, unit: str = "heads") -> Figure:
    """Scores against how much of a model was removed (1905.10650, Figures 3 and 4): a panel per score.

    One line per `curves`; a thin dashed one goes through the score of each original. What was removed counts from 0;
    an axis of scores that begins above says where.

    Args:
        unit: what was removed, for the axis: "heads", "experts", "parameters".

    Raises:
        PruneError: matplotlib is not installed, or there is no point.
    """
    if not points:
        raise PruneError("There is nothing to draw: no checkpoint was measured.")
    scores = list(points[0].scores)
    figure, (panels,) = new_figure(PANEL[0] * len(scores), PANEL[1], columns=len(scores))
    lines = curves(points)
    for axes, score in zip(panels, scores, strict=True):
        for name, members in lines.items():
            removed = [100 * point.removed for point in members]
            style = "--" if members[-1].is_dashed else "-"
            values = [point.scores[score] for point in members]
            axes.plot(removed, values, style, marker="o", markersize=4, label=name)
        for point in points:
            if point.is_original:
                axes.axhline(point.scores[score], color="gray", linestyle="--", linewidth=0.8)
        axes.set_xlim(left=min(-2.0, *(102 * point.removed for point in points)))
        axes.set_xlabel(f"{unit} removed, %")
        low, _ = axes.get_ylim()
        axes.set_ylabel(f"{score} (axis from {low:.3g})" if low > 0 else score)
        axes.grid(alpha=0.3)
        if len(lines) > 1:
            axes.legend(fontsize=8)
        hide_spines(axes, "top", "right")
    return figure


@dataclass(frozen=True)
class Speed:
    """What was measured of one checkpoint at one setting.

    Attributes:
        checkpoint: its label.
        batch_size, setting: what it was measured at; a panel for each of the latter, such as "beam 5".
        median, deviation: over the runs, see `Spread`.
    """

    checkpoint: str
    batch_size: int
    setting: str
    median: float
    deviation: float


def speed_lines(speeds: Sequence[Speed]) -> dict[str, dict[str, list[Speed]]]:
    """Setting -> checkpoint -> its speeds by batch size; checkpoints in the order in which they come."""
    names = dict.fromkeys(speed.checkpoint for speed in speeds)
    by_size = sorted(speeds, key=lambda speed: speed.batch_size)
    return {
        setting: {
            name: line
            for name in names
            if (line := [s for s in by_size if (s.setting, s.checkpoint) == (setting, name)])
        }
        for setting in dict.fromkeys(speed.setting for speed in speeds)
    }


def speed_figure(speeds: Sequence[Speed], unit: str = "tokens per second") -> Figure:
    """Speed against batch size (2309.01826, appendix D): a panel for each setting, a line for each checkpoint.

    Bars are a standard deviation up and down.

    Raises:
        PruneError: matplotlib is not installed, or there is nothing to draw.
    """
    if not speeds:
        raise PruneError("There is nothing to draw: no speed was measured.")
    by_setting = speed_lines(speeds)
    figure, (panels,) = new_figure(PANEL[0] * len(by_setting), PANEL[1], columns=len(by_setting))
    for axes, (setting, lines) in zip(panels, by_setting.items(), strict=True):
        for name, line in lines.items():
            axes.errorbar(
                [speed.batch_size for speed in line],
                [speed.median for speed in line],
                yerr=[speed.deviation for speed in line],
                marker="o",
                markersize=4,
                capsize=3,
                label=name,
            )
        sizes = sorted({speed.batch_size for line in lines.values() for speed in line})
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.set_xlabel("batch size")
        axes.set_ylabel(unit)
        axes.set_title(setting, fontsize=10)
        axes.grid(alpha=0.3)
        axes.legend()
        hide_spines(axes, "top", "right")
    return figure


def languages_figure(
    trees: Mapping[str, tuple[Sequence[str], NDArray[np.float64]]],
    experts: tuple[Sequence[str], Sequence[float]] | None,
    similarity: tuple[Sequence[str], NDArray[np.float64]] | None,
    families: Mapping[str, str] | None = None,
    title: str = "Jaccard similarity: encoder below the diagonal, decoder above",
) -> Figure:
    """Figures of 2212.09811, a panel for each part that is given: dendrograms (3, 7), experts per layer (1), Table 4.

    Args:
        trees: title -> the languages, and scipy's linkage matrix [len(languages) - 1, 4].
        experts: names of the layers, and the mean number of experts that each keeps.
        similarity: names of the pairs, and Table 4: encoder below the diagonal, decoder above.
        families: language -> family, which gives its name in the trees a colour.
        title: of the similarities.

    Raises:
        PruneError: matplotlib is not installed, or there is nothing to draw.
    """
    panels = len(trees) + (experts is not None) + (similarity is not None)
    if panels == 0:
        raise PruneError("There is nothing to draw: the statistics hold fewer than two languages.")
    leaves = max([len(languages) for languages, _ in trees.values()], default=0)
    rows = -(-panels // 2)
    figure, grid = new_figure(13, max(4.5, 0.16 * leaves) * rows, rows, 2 if panels > 1 else 1)
    free = iter([axes for row in grid for axes in row])
    for heading, (languages, linkage) in trees.items():
        _dendrogram(next(free), heading, languages, linkage, families or {})
    if experts is not None:
        _experts_per_layer(next(free), *experts)
    if similarity is not None:
        _pair_similarity(figure, next(free), *similarity, title)
    for unused in free:
        unused.set_visible(False)
    return figure


def _dendrogram(
    axes: Any,
    title: str,
    languages: Sequence[str],
    linkage: NDArray[np.float64],
    families: Mapping[str, str],
) -> None:
    from scipy.cluster import hierarchy

    branches = {"link_color_func": lambda _: "0.4"} if families else {}  # colours are those of the families
    hierarchy.dendrogram(
        linkage, labels=list(languages), orientation="left", ax=axes, leaf_font_size=8, **branches
    )
    if families:
        from matplotlib import colormaps
        from matplotlib.patches import Patch

        palette = colormaps["tab20"]
        colours = {name: palette(index % 20) for index, name in enumerate(dict.fromkeys(families.values()))}
        for label in axes.get_yticklabels():
            label.set_color(colours.get(families.get(label.get_text(), ""), "black"))
        present = dict.fromkeys(families[language] for language in languages if language in families)
        handles = [Patch(color=colours[name], label=name) for name in colours if name in present]
        axes.legend(handles=handles, fontsize=7, loc="upper left")
    axes.set_title(title)
    axes.set_xlabel("distance at which clusters join")
    hide_spines(axes, "top", "right", "left")


def _experts_per_layer(axes: Any, layers: Sequence[str], means: Sequence[float]) -> None:
    colors = ["tab:blue" if "encoder" in layer.split(".") else "tab:orange" for layer in layers]
    short = [layer.removeprefix("model.").replace(".layers.", " ").removesuffix(".ffn") for layer in layers]
    axes.bar(range(len(layers)), means, color=colors)
    axes.set_xticks(range(len(layers)), short, rotation=45, ha="right", fontsize=8)
    axes.set_ylabel("experts kept, mean over the pairs")
    axes.set_title("Experts per layer under the global threshold")


def _pair_similarity(
    figure: Figure, axes: Any, pairs: Sequence[str], matrix: NDArray[np.float64], title: str
) -> None:
    image = axes.imshow(matrix, vmin=0, vmax=1, cmap="viridis")
    figure.colorbar(image, ax=axes, shrink=0.8)
    axes.set_title(title, fontsize=10)
    ticks = range(len(pairs)) if len(pairs) <= NAMED_PAIRS else []
    axes.set_xticks(ticks, [pairs[tick] for tick in ticks], rotation=90, fontsize=6)
    axes.set_yticks(ticks, [pairs[tick] for tick in ticks], fontsize=6)
