"""Correlation maps of embedding tables side by side (1911.12385, Figures 4 and 7)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from prunecli.analysis.correlation import mean_correlation
from prunecli.analysis.plots import require_matplotlib, save_figure
from prunecli.errors import PruneError


def plot_correlations(maps: Mapping[str, NDArray[np.float64]], path: Path, title: str) -> None:
    """Draw one panel for each map, all on the scale from 0 to 1, and write the PNG whole or not at all.

    Args:
        maps: name -> map [m, m]; the name and the mean beside the diagonal stand above each panel.
        path: the file.
        title: above the panels.

    Raises:
        PruneError: matplotlib is not installed, there is no map, or one is not square.
    """
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if not maps:
        raise PruneError("There is nothing to draw: no correlation map was given.")
    for name, found in maps.items():
        if found.ndim != 2 or found.shape[0] != found.shape[1] or not found.size:
            raise PruneError(
                f"The correlation map of {name} has the shape {list(found.shape)}: it is not square."
            )
    figure = Figure(figsize=(1 + 4 * len(maps), 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    axes = figure.subplots(1, len(maps), squeeze=False)[0].tolist()
    for place, (name, found) in zip(axes, maps.items(), strict=True):
        image = place.imshow(found, vmin=0, vmax=1, cmap="viridis", interpolation="antialiased")
        place.set_title(f"{name}\nmean beside the diagonal {mean_correlation(found):.3f}", fontsize=10)
        place.set_xlabel("dimension")
        place.tick_params(labelsize=8)
    axes[0].set_ylabel("dimension")
    figure.colorbar(image, ax=axes, shrink=0.8)
    save_figure(figure, path)
