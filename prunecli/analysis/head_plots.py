"""The heat map of attention heads: layers by heads, one panel for each kind of attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prunecli.analysis.plots import require_matplotlib, save_figure
from prunecli.errors import PruneError
from prunecli.model.attention import KINDS, AttentionKind, AttentionLayer

KIND_NAMES: dict[AttentionKind, str] = {
    "encoder": "encoder self-attention",
    "decoder": "decoder self-attention",
    "cross": "cross-attention",
}
LABELS = 32
"""With more heads or layers than this, only some are numbered."""


def head_map(
    values: Mapping[str, Sequence[float]], layers: Sequence[AttentionLayer], path: Path, title: str
) -> None:
    """Draw the value of every head, and write the PNG whole or not at all; pruned heads are grey.

    All panels have one colour scale; values on both sides of 0 get one that is white at 0.

    Args:
        values: attention's name -> a finite value for each head that it holds.
        layers: the attentions.
        path: the file.
        title: above the panels.

    Raises:
        PruneError: matplotlib is not installed, or there is nothing to draw.
    """
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = head_grids(values, layers)
    if not panels:
        raise PruneError("There is nothing to draw: no head has a value.")
    low, high, colours = _scale(np.concatenate([grid[~np.isnan(grid)] for grid in panels.values()]))
    rows, columns = (max(grid.shape[axis] for grid in panels.values()) for axis in (0, 1))
    size = 1 + (2 + 0.3 * columns) * len(panels), 1.6 + 0.3 * rows
    figure = Figure(figsize=(max(size[0], 5), max(size[1], 3)), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    axes = figure.subplots(1, len(panels), squeeze=False)[0].tolist()
    for place, (kind, grid) in zip(axes, panels.items(), strict=True):
        image = place.imshow(grid, vmin=low, vmax=high, cmap=colours, aspect="auto")
        _label(place, kind, grid.shape)
    figure.colorbar(image, ax=axes, shrink=0.9)
    save_figure(figure, path)


def head_grids(
    values: Mapping[str, Sequence[float]], layers: Sequence[AttentionLayer]
) -> dict[AttentionKind, NDArray[np.float64]]:
    """Kind of attention -> `[layers, original heads]`, NaN where a head is pruned; kinds without values left out."""
    found: dict[AttentionKind, NDArray[np.float64]] = {}
    for kind in KINDS:
        own = [layer for layer in layers if layer.kind == kind and layer.name in values]
        if not any(layer.heads for layer in own):
            continue
        shape = max(layer.layer for layer in own) + 1, max(layer.original_heads for layer in own)
        grid = np.full(shape, np.nan)
        for layer in own:
            grid[layer.layer, list(layer.heads)] = np.asarray(values[layer.name], np.float64)
        found[kind] = grid
    return found


def _scale(values: NDArray[np.float64]) -> tuple[float, float, str]:
    low, high = float(values.min()), float(values.max())
    if low < 0 < high:
        most = max(-low, high)
        return -most, most, "RdBu_r"
    return min(low, 0.0), max(high, 0.0), "viridis" if high > 0 else "viridis_r"


def _label(axes: Any, kind: AttentionKind, shape: tuple[int, ...]) -> None:
    axes.set_facecolor("0.75")
    axes.set_title(KIND_NAMES[kind], fontsize=10)
    axes.set_xlabel("head")
    axes.set_ylabel("layer")
    for ticks, count in ((axes.set_yticks, shape[0]), (axes.set_xticks, shape[1])):
        ticks(range(0, count, -(-count // LABELS)))
    axes.tick_params(labelsize=8)
