"""Scores against how much of a model was removed (1905.10650, Figures 3 and 4), as a PNG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prunecli.analysis.plots import require_matplotlib, save_figure
from prunecli.errors import PruneError


@dataclass(frozen=True)
class CurvePoint:
    """One model of a curve.

    Attributes:
        removed: fraction of the heads, experts or parameters that it lost, in [0, 1].
        scores: what was measured of it, such as {"chrF++": 51.2}; the same names for all points.
        lines: the curves that it is a point of.
        is_original: whether they start from it.
    """

    removed: float
    scores: Mapping[str, float]
    lines: tuple[str, ...] = ("",)
    is_original: bool = False


def curves(points: Sequence[CurvePoint]) -> dict[str, list[CurvePoint]]:
    """Line -> its points by what was removed."""
    names = dict.fromkeys(line for point in points for line in point.lines)
    return {
        name: sorted((p for p in points if name in p.lines), key=lambda point: point.removed)
        for name in names
    }


def score_curve(points: Sequence[CurvePoint], path: Path, *, unit: str = "heads") -> None:
    """Draw one panel per score, one line per `curves`, and write the PNG whole or not at all.

    A dashed line goes through the score of each original. What was removed counts from 0; an axis of scores that begins
    above says where.

    Args:
        unit: what was removed, for the axis: "heads", "experts", "parameters".

    Raises:
        PruneError: matplotlib is not installed, or there is no point.
    """
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if not points:
        raise PruneError("There is nothing to draw: no checkpoint was measured.")
    names = list(points[0].scores)
    figure = Figure(figsize=(6.5 * len(names), 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(names), squeeze=False)[0]
    for axes, name in zip(panels, names, strict=True):
        _panel(axes, points, name, unit)
    save_figure(figure, path)


def _panel(axes: Any, points: Sequence[CurvePoint], score: str, unit: str) -> None:
    lines = curves(points)
    for name, members in lines.items():
        axes.plot(
            [100 * point.removed for point in members],
            [point.scores[score] for point in members],
            marker="o",
            markersize=4,
            label=name,
        )
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
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
