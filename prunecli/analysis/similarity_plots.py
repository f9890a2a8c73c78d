"""Similarities of components as heat maps (2309.01826, Figure 1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prunecli.analysis.components import Component
from prunecli.analysis.model_similarity import Comparison
from prunecli.analysis.plots import require_matplotlib, save_figure
from prunecli.analysis.similarity_results import SIDES
from prunecli.architectures.records import Side
from prunecli.errors import PruneError

LABELS = 40
"""With more components than this, only some are named."""
TITLES = {"cka": "CKA", "lns": "LNS"}


@dataclass(frozen=True)
class Panel:
    """One heat map.

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
    first = (names[0], comparison.first)
    second = (names[-1], comparison.second)
    found = []
    for measure in comparison.similarities:
        matrices = [(comparison.within_first(measure), first, first)]
        if comparison.second:
            matrices.append((comparison.within_second(measure), second, second))
            matrices.append((comparison.between(measure), first, second))
        rows = [[_panel(f"{TITLES[measure]}, {side}", side, *parts) for parts in matrices] for side in SIDES]
        found += rows if comparison.second else [[panel for row in rows for panel in row]]
    shown = [[panel for panel in row if panel.values.size] for row in found]
    return [row for row in shown if row]


Model = tuple[str, Sequence[Component]]
"""Its name, and the components along one axis of a matrix."""


def _panel(title: str, side: Side, matrix: NDArray[np.float64], rows: Model, columns: Model) -> Panel:
    (row_name, row_parts), (column_name, column_parts) = rows, columns
    down = [place for place, part in enumerate(row_parts) if part.side == side]
    across = [place for place, part in enumerate(column_parts) if part.side == side]
    return Panel(
        title,
        tuple(row_parts[place].label for place in down),
        tuple(column_parts[place].label for place in across),
        matrix[np.ix_(down, across)],
        (row_name, column_name),
    )


def similarity_map(comparison: Comparison, names: Sequence[str], path: Path) -> None:
    """Draw `similarity_panels`, and write the PNG whole or not at all; a label is layer.kind: sa, ca, ffn.

    All panels have one colour scale, from 0 to 1; components with the same output for every sentence are grey.

    Args:
        names: of the first model, and of the second where there is one.

    Raises:
        PruneError: matplotlib is not installed, or there is nothing to draw.
    """
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = similarity_panels(comparison, names)
    if not panels:
        raise PruneError("There is nothing to draw: the models have no component.")
    columns = max(map(len, panels))
    longest = max(max(panel.values.shape) for row in panels for panel in row)
    size = min(max(3.2, 0.24 * longest), 10)
    figure = Figure(figsize=(size * columns + 1.2, (size + 0.5) * len(panels)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(panels), columns, squeeze=False)
    for places, row in zip(axes, panels, strict=True):
        for place in places[len(row) :]:
            place.set_visible(False)
        for place, panel in zip(places, row, strict=False):
            image = place.imshow(panel.values, vmin=0, vmax=1, cmap="Reds", aspect="auto")
            _label(place, panel)
    figure.colorbar(image, ax=axes.ravel().tolist(), shrink=0.6)
    save_figure(figure, path)


def _label(axes: Any, panel: Panel) -> None:
    axes.set_facecolor("0.75")
    axes.set_title(panel.title, fontsize=10)
    axes.set_ylabel(panel.names[0])
    axes.set_xlabel(panel.names[1])
    for set_ticks, labels, turn in (
        (axes.set_yticks, panel.rows, 0),
        (axes.set_xticks, panel.columns, 90),
    ):
        places = range(0, len(labels), -(-len(labels) // LABELS))
        set_ticks(places, [labels[place] for place in places], rotation=turn, fontsize=7)
