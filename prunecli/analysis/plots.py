"""Figures of 2212.09811 in one PNG: dendrograms (3, 7), experts per layer (1), similarities (Table 4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prunecli.errors import PruneError
from prunecli.tensors.transaction import new_file

HEATMAP_LABELS = 30
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


def plot_languages(
    path: Path,
    trees: Mapping[str, tuple[Sequence[str], NDArray[np.float64]]],
    experts: tuple[Sequence[str], Sequence[float]] | None,
    similarity: tuple[Sequence[str], NDArray[np.float64]] | None,
) -> None:
    """Draw one panel for each part that is given, and write the PNG whole or not at all.

    Args:
        path: the file.
        trees: title -> the languages, and scipy's linkage matrix [len(languages) - 1, 4].
        experts: names of the layers, and the mean number of experts that each keeps.
        similarity: names of the pairs, and Table 4: encoder below the diagonal, decoder above.

    Raises:
        PruneError: matplotlib is not installed, or there is nothing to draw.
    """
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = len(trees) + (experts is not None) + (similarity is not None)
    if panels == 0:
        raise PruneError("There is nothing to draw: the statistics hold fewer than two languages.")
    leaves = max([len(languages) for languages, _ in trees.values()], default=0)
    rows = -(-panels // 2)
    figure = Figure(figsize=(13, max(4.5, 0.16 * leaves) * rows), layout="constrained")
    FigureCanvasAgg(figure)
    axes = iter(np.atleast_1d(figure.subplots(rows, 2 if panels > 1 else 1)).ravel().tolist())
    for title, (languages, linkage) in trees.items():
        _dendrogram(next(axes), title, languages, linkage)
    if experts is not None:
        _bars(next(axes), *experts)
    if similarity is not None:
        _heatmap(figure, next(axes), *similarity)
    for unused in axes:
        unused.set_visible(False)
    save_figure(figure, path)


def _dendrogram(axes: Any, title: str, languages: Sequence[str], linkage: NDArray[np.float64]) -> None:
    from scipy.cluster import hierarchy

    hierarchy.dendrogram(linkage, labels=list(languages), orientation="left", ax=axes, leaf_font_size=8)
    axes.set_title(title)
    axes.set_xlabel("distance at which clusters join")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _bars(axes: Any, layers: Sequence[str], means: Sequence[float]) -> None:
    colors = ["tab:blue" if "encoder" in layer.split(".") else "tab:orange" for layer in layers]
    short = [layer.removeprefix("model.").replace(".layers.", " ").removesuffix(".ffn") for layer in layers]
    axes.bar(range(len(layers)), means, color=colors)
    axes.set_xticks(range(len(layers)), short, rotation=45, ha="right", fontsize=8)
    axes.set_ylabel("experts kept, mean over the pairs")
    axes.set_title("Experts per layer under the global threshold")


def _heatmap(figure: Any, axes: Any, pairs: Sequence[str], matrix: NDArray[np.float64]) -> None:
    image = axes.imshow(matrix, vmin=0, vmax=1, cmap="viridis")
    figure.colorbar(image, ax=axes, shrink=0.8)
    axes.set_title("Jaccard similarity: encoder below the diagonal, decoder above", fontsize=10)
    ticks = range(len(pairs)) if len(pairs) <= HEATMAP_LABELS else []
    axes.set_xticks(ticks, [pairs[tick] for tick in ticks], rotation=90, fontsize=6)
    axes.set_yticks(ticks, [pairs[tick] for tick in ticks], fontsize=6)


def save_figure(figure: Any, path: Path) -> None:
    """Write a matplotlib figure as a PNG, whole or not at all."""
    with new_file(path) as partial:
        # Without the version of matplotlib: equal inputs make equal bytes.
        figure.savefig(partial, format="png", dpi=120, metadata={"Software": None})
