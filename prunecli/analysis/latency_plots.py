"""Decoding speed against batch size (2309.01826, appendix D), as a PNG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prunecli.analysis.plots import require_matplotlib, save_figure
from prunecli.errors import PruneError


@dataclass(frozen=True)
class Speed:
    """What was measured of one checkpoint at one setting.

    Attributes:
        checkpoint: its label.
        batch_size, beam: the setting.
        mean, deviation: of the runs' tokens per second.
    """

    checkpoint: str
    batch_size: int
    beam: int
    mean: float
    deviation: float


def speed_lines(speeds: Sequence[Speed]) -> dict[int, dict[str, list[Speed]]]:
    """Beam -> checkpoint -> its speeds by batch size; checkpoints in the order in which they come."""
    found: dict[int, dict[str, list[Speed]]] = {beam: {} for beam in sorted({s.beam for s in speeds})}
    for speed in sorted(speeds, key=lambda speed: speed.batch_size):
        found[speed.beam].setdefault(speed.checkpoint, []).append(speed)
    order = list(dict.fromkeys(speed.checkpoint for speed in speeds))
    return {beam: {name: lines[name] for name in order if name in lines} for beam, lines in found.items()}


def speed_plot(speeds: Sequence[Speed], path: Path) -> None:
    """Draw tokens per second against batch size, and write the PNG whole or not at all.

    One panel for each beam, one line for each checkpoint; bars are a standard deviation up and down.

    Raises:
        PruneError: matplotlib is not installed, or there is nothing to draw.
    """
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = speed_lines(speeds)
    if not panels:
        raise PruneError("There is nothing to draw: no speed was measured.")
    figure = Figure(figsize=(6.5 * len(panels), 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for place, (beam, lines) in zip(axes, panels.items(), strict=True):
        _panel(place, beam, lines)
    save_figure(figure, path)


def _panel(axes: Any, beam: int, lines: dict[str, list[Speed]]) -> None:
    for name, speeds in lines.items():
        axes.errorbar(
            [speed.batch_size for speed in speeds],
            [speed.mean for speed in speeds],
            yerr=[speed.deviation for speed in speeds],
            marker="o",
            markersize=4,
            capsize=3,
            label=name,
        )
    sizes = sorted({speed.batch_size for speeds in lines.values() for speed in speeds})
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("batch size")
    axes.set_ylabel("tokens per second")
    axes.set_title(f"beam {beam}", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend()
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
