"""Heat maps as figures: scores of attention heads, similarities of components, correlations of embedding dimensions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
from numpy.typing import NDArray

from prunecli.analysis.correlation import mean_correlation
from prunecli.analysis.plots import filled, hide_spines, new_figure
from prunecli.architectures.records import Side
from prunecli.errors import PruneError
from prunecli.model.attention import KIND_NAMES, KINDS, AttentionKind, AttentionLayer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from prunecli.analysis.components import Component
    from prunecli.analysis.model_similarity import Comparison

NUMBERED_HEADS, NAMED_COMPONENTS = 32, 40
"""With more heads, layers or components than this, only some are named."""
BINS = 20
"""Of a histogram of heads."""
ABSENT = "0.75"
"""Grey, of cells without a value."""
TITLES = {"cka": "CKA", "lns": "LNS"}


def head_figure(
    values: Mapping[str, Sequence[float]],
    layers: Sequence[AttentionLayer],
    title: str,
    histogram: str | None = None,
) -> Figure:
    """The value of every head, layers by heads, a panel for each kind of attention; pruned heads are grey.

    All panels have one colour scale; values on both sides of 0 get one that is white at 0.

    Args:
        values: attention's name -> a finite value for each head that it holds.
        layers: the attentions.
        title: above the panels.
        histogram: what the values are, for one more panel: how many heads have which (1905.10650, Figure 1).

    Raises:
        PruneError: matplotlib is not installed, or there is nothing to draw.
    """
    grids = head_grids(values, layers)
    if not grids:
        raise PruneError("There is nothing to draw: no head has a value.")
    low, high, colours = _colour_scale(np.concatenate([grid[~np.isnan(grid)] for grid in grids.values()]))
    rows, columns = (max(grid.shape[axis] for grid in grids.values()) for axis in (0, 1))
    count = len(grids) + (histogram is not None)
    width, height = max(1 + (2 + 0.3 * columns) * count, 5), max(1.6 + 0.3 * rows, 3)
    figure, (panels,) = new_figure(width, height, columns=count, title=title)
    if histogram is not None:
        _distribution(panels.pop(), grids, histogram)
    for axes, (kind, grid) in zip(panels, grids.items(), strict=True):
        image = axes.imshow(grid, vmin=low, vmax=high, cmap=colours, aspect="auto")
        axes.set_facecolor(ABSENT)
        axes.set_title(KIND_NAMES[kind], fontsize=10)
        axes.set_xlabel("head")
        axes.set_ylabel("layer")
        for set_ticks, count in ((axes.set_yticks, len(grid)), (axes.set_xticks, grid.shape[1])):
            set_ticks(range(0, count, -(-count // NUMBERED_HEADS)))
        axes.tick_params(labelsize=8)
    figure.colorbar(image, ax=panels, shrink=0.9)
    return figure


def _distribution(axes: Any, grids: Mapping[AttentionKind, NDArray[np.float64]], label: str) -> None:
    """How many heads have which value, kinds of attention on top of one another; a line at 0."""
    values = [grid[~np.isnan(grid)] for grid in grids.values()]
    axes.hist(values, bins=BINS, stacked=True, label=[KIND_NAMES[kind] for kind in grids])
    axes.axvline(0, color="black", linestyle="--", linewidth=0.8)
    axes.set_xlabel(label)
    axes.set_ylabel("heads")
    axes.tick_params(labelsize=8)
    if len(values) > 1:
        axes.legend(fontsize=8)
    hide_spines(axes, "top", "right")


def head_grids(
    values: Mapping[str, Sequence[float]], layers: Sequence[AttentionLayer]
) -> dict[AttentionKind, NDArray[np.float64]]:
    """Kind of attention -> `[layers, original heads]`, NaN where a head is pruned; kinds without values left out."""
    grids: dict[AttentionKind, NDArray[np.float64]] = {}
    for kind in KINDS:
        own = [layer for layer in layers if layer.kind == kind and layer.name in values]
        if not any(layer.heads for layer in own):
            continue
        shape = max(layer.layer for layer in own) + 1, max(layer.original_heads for layer in own)
        grids[kind] = np.full(shape, np.nan)
        for layer in own:
            grids[kind][layer.layer, list(layer.heads)] = np.asarray(values[layer.name], np.float64)
    return grids


def _colour_scale(values: NDArray[np.float64]) -> tuple[float, float, str]:
    low, high = float(values.min()), float(values.max())
    if low < 0 < high:
        most = max(-low, high)
        return -most, most, "RdBu_r"
    return min(low, 0.0), max(high, 0.0), "viridis" if high > 0 else "viridis_r"


@dataclass(frozen=True)
class Panel:
    """One heat map of similarities.

    Attributes:
        title: above it.
        rows, columns: labels, from top to bottom and from left to right.
        values: `[rows, columns]` in [0, 1]; NaN stays grey.
        names: of the models on the axes, (rows, columns).
    """

    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    values: NDArray[np.float64]
    names: tuple[str, str]


def similarity_panels(comparison: Comparison, names: Sequence[str]) -> list[list[Panel]]:
    """Rows of panels: for each measure and side each model by itself, then the two against each other.

    One model alone has a row for each measure, a panel for each side.

    Args:
        names: of the first model, and of the second where there is one.
    """
    first, second = (names[0], comparison.first), (names[-1], comparison.second)
    rows: list[list[Panel]] = []
    for measure in comparison.similarities:
        matrices = [(comparison.within_first(measure), first, first)]
        if comparison.second:
            matrices.append((comparison.within_second(measure), second, second))
            matrices.append((comparison.between(measure), first, second))
        by_side = [
            [_panel(f"{TITLES[measure]}, {side}", side, *matrix) for matrix in matrices]
            for side in get_args(Side)
        ]
        rows += by_side if comparison.second else [[panel for row in by_side for panel in row]]
    shown = [[panel for panel in row if panel.values.size] for row in rows]
    return [row for row in shown if row]


def _panel(
    title: str,
    side: Side,
    matrix: NDArray[np.float64],
    rows: tuple[str, Sequence[Component]],
    columns: tuple[str, Sequence[Component]],
) -> Panel:
    """The part of a matrix between a model and a model, each a name and its components, that lies on one side."""
    (row_name, row_parts), (column_name, column_parts) = rows, columns
    down = [index for index, part in enumerate(row_parts) if part.side == side]
    across = [index for index, part in enumerate(column_parts) if part.side == side]
    return Panel(
        title,
        tuple(row_parts[index].label for index in down),
        tuple(column_parts[index].label for index in across),
        matrix[np.ix_(down, across)],
        (row_name, column_name),
    )


def similarity_figure(comparison: Comparison, names: Sequence[str]) -> Figure:
    """`similarity_panels` (2309.01826, Figure 1); a label is layer.kind: sa, ca, ffn.

    All panels have one colour scale, from 0 to 1; components with the same output for every sentence are grey.

    Args:
        names: of the first model, and of the second where there is one.

    Raises:
        PruneError: matplotlib is not installed, or there is nothing to draw.
    """
    panels = similarity_panels(comparison, names)
    if not panels:
        raise PruneError("There is nothing to draw: the models have no component.")
    columns = max(map(len, panels))
    longest = max(max(panel.values.shape) for row in panels for panel in row)
    size = min(max(3.2, 0.24 * longest), 10)
    figure, grid = new_figure(size * columns + 1.2, (size + 0.5) * len(panels), len(panels), columns)
    for axes, panel in filled(grid, panels):
        image = axes.imshow(panel.values, vmin=0, vmax=1, cmap="Reds", aspect="auto")
        axes.set_facecolor(ABSENT)
        axes.set_title(panel.title, fontsize=10)
        axes.set_ylabel(panel.names[0])
        axes.set_xlabel(panel.names[1])
        for set_ticks, labels, turn in (
            (axes.set_yticks, panel.rows, 0),
            (axes.set_xticks, panel.columns, 90),
        ):
            ticks = range(0, len(labels), -(-len(labels) // NAMED_COMPONENTS))
            set_ticks(ticks, [labels[tick] for tick in ticks], rotation=turn, fontsize=7)
    figure.colorbar(image, ax=[axes for row in grid for axes in row], shrink=0.6)
    return figure


def correlation_figure(rows: Sequence[Mapping[str, NDArray[np.float64]]], title: str) -> Figure:
    """Correlation maps in rows (1911.12385, Figures 4 and 7 to 11), all from 0 to 1.

    Args:
        rows: name -> map [size, size] for each row; above each panel its name and the mean beside the diagonal.
        title: above the panels.

    Raises:
        PruneError: matplotlib is not installed.
    """
    rows = [maps for maps in rows if maps]
    columns = max(map(len, rows))
    size = 4 if columns <= 4 else 3
    figure, grid = new_figure(1 + size * columns, (size + 0.8) * len(rows), len(rows), columns, title)
    for axes, (name, values) in filled(grid, [[*maps.items()] for maps in rows]):
        image = axes.imshow(values, vmin=0, vmax=1, cmap="viridis", interpolation="antialiased")
        axes.set_title(f"{name}\nmean beside the diagonal {mean_correlation(values):.3f}", fontsize=10)
        axes.tick_params(labelsize=8)
    figure.colorbar(image, ax=[axes for row_axes in grid for axes in row_axes], shrink=0.8)
    return figure
