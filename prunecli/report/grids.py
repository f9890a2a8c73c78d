"""Grids of cells as inline SVG: heat maps of values, strips of what was kept."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from prunecli.report.drawing import LETTER, box, cell, figure, path, sample, shortened, text
from prunecli.report.markup import Html, element, number
from prunecli.report.style import STEPS

MOST_CELLS = 2500
"""Of more cells than this, the values are not told one by one on pointing: the page stays small."""
NAME_LETTERS = 28
"""Letters of a name beside a row or below a column."""
Grid = Sequence[Sequence["float | None"]]
"""Rows of values; None: there is nothing."""


@dataclass(frozen=True)
class Scale:
    """Values to steps of colour.

    Attributes:
        low, high: the ends; values beyond them take the end's colour.
        around: whether the middle means 0 and the two sides have colours of their own.
    """

    low: float
    high: float
    around: bool = False

    def step(self, value: float) -> str:
        """The class of the value's colour."""
        width = self.high - self.low
        share = value / width - self.low / width if width > 0 else 1.0
        return self.colour(min(STEPS - 1, max(0, math.floor(share * STEPS))))

    def colour(self, step: int) -> str:
        """The class of a step's colour."""
        return f"{'d' if self.around else 'q'}{step}"


def scale_of(grids: Sequence[Grid]) -> Scale:
    """One scale for all: from 0 up (or down to 0), or around 0 where values lie on both sides of it."""
    values = [value for grid in grids for row in grid for value in row if value is not None]
    low, high = min(values, default=0.0), max(values, default=0.0)
    if low < 0 < high:
        most = max(-low, high)
        return Scale(-most, most, around=True)
    return Scale(min(low, 0.0), max(high, 0.0))


def heat_map(
    caption: str,
    grid: Grid,
    rows: Sequence[str],
    columns: Sequence[str],
    scale: Scale,
    *,
    told: tuple[str, str] = ("", ""),
    gone: Sequence[Sequence[bool]] | None = None,
) -> Html:
    """Cells coloured by value, named along both sides; empty ones are grey.

    Args:
        caption: what it shows.
        grid: [rows][columns]; shorter rows end in nothing.
        rows, columns: their names.
        scale: of the colours.
        told: before the names of a row and a column where a cell's value is told: ("layer ", "head ").
        gone: [rows][columns]: cells with a stroke through them, of what was dropped.
    """
    width, height = _cell_size(len(columns)), _cell_size(len(rows))
    if len(columns) != len(rows):
        height = max(height, min(14.0, 900 / max(1, len(rows))))
    left = 10 + LETTER * min(NAME_LETTERS, max(map(len, rows), default=0))
    bottom = height * len(rows)
    longest = max(map(len, columns), default=0)
    turned = LETTER * longest > width * _named_every(width)
    short_rows, short_columns = shortened(rows, NAME_LETTERS), shortened(columns, NAME_LETTERS)
    parts = []
    for index in range(0, len(rows), _named_every(height)):
        parts.append(
            text(left - 6, height * (index + 0.5) + 4, short_rows[rows[index]], "soft", anchor="end")
        )
    for index in range(0, len(columns), _named_every(width)):
        x, y = left + width * (index + 0.5), bottom + (8 if turned else 14)
        turn = f"rotate(-90 {number(x)} {number(y)}) translate(0 4)" if turned else None
        anchor = "end" if turned else "middle"
        parts.append(text(x, y, short_columns[columns[index]], "soft", anchor=anchor, turn=turn))
    gap = 1.0 if min(width, height) >= 8 else 0.0
    is_told = sum(map(len, grid)) <= MOST_CELLS
    outlines: dict[str, list[str]] = {}
    strokes: list[str | float] = []
    for line, values in enumerate(grid):
        for column, value in enumerate(values):
            kind = "gone" if value is None else scale.step(value)
            area = left + width * column, height * line, width - gap, height - gap
            is_gone = gone is not None and gone[line][column]
            strokes += ["M", *area[:2], "l", *area[2:]] if is_gone else []
            if is_told:
                said = "nothing" if value is None else f"{value:.4g}"
                said += ", dropped" if is_gone else ""
                parts.append(box(*area, kind, f"{told[0]}{rows[line]}, {told[1]}{columns[column]}: {said}"))
            else:
                outlines.setdefault(kind, []).append(cell(*area))
    parts += [path(*cells, kind=kind) for kind, cells in sorted(outlines.items())]
    parts += [path(*strokes, kind="whisker")] if strokes else []
    below = 12 + LETTER * min(NAME_LETTERS, longest) if turned else 18.0
    return figure(caption, left + width * len(columns) + 12, bottom + below, parts)


def _cell_size(cells: int) -> float:
    """The side of a cell, such that so many have room."""
    if cells <= 16:
        return 22.0
    return 14.0 if cells <= 40 else 10.0 if cells <= 80 else max(3.0, 800 / cells)


def _named_every(size: float) -> int:
    """Every which name has room beside its cell."""
    return max(1, math.ceil(13 / size))


def scale_key(scale: Scale, low: str, high: str) -> Html:
    """The colours from low to high, with what the ends mean."""
    steps = (box(14.0 * step, 0, 14, 12, scale.colour(step)) for step in range(STEPS))
    return element("p", f"{low} ", sample(14 * STEPS, 12, *steps), f" {high}", class_="key")


@dataclass(frozen=True)
class Strip:
    """What one layer kept.

    Attributes:
        name: of the layer.
        kept: original ids.
        original: how many there were.
    """

    name: str
    kept: tuple[int, ...]
    original: int


def strips(caption: str, layers: Sequence[Strip], *, counts: bool = True) -> Html:
    """A strip per layer: a cell for each id of the original model, filled where it was kept."""
    most = max(layer.original for layer in layers)
    size = min(14.0, 640 / most)
    left = 10 + LETTER * max(len(layer.name) for layer in layers)
    pitch = 18.0 if counts else max(size + 1, 9.0)
    height = pitch - (4 if counts else 1.5)
    gap = 1.0 if size >= 5 else 0.0
    parts: list[Html] = []
    for index, layer in enumerate(layers):
        y = pitch * index + 2
        removed = set(range(layer.original)).difference(layer.kept)
        for kind, ids in (("gone", sorted(removed)), ("kept", sorted(set(layer.kept)))):
            runs = _runs(ids, joined=not gap)
            cells = [cell(left + size * first, y, size * count - gap, height) for first, count in runs]
            parts += [path(*cells, kind=kind)] if cells else []
        parts.append(text(left - 6, y + height - 2, layer.name, "soft", anchor="end"))
        if counts:
            kept = f"{len(layer.kept)} of {layer.original}"
            parts.append(text(left + size * most + 8, y + height - 3, kept, "soft"))
    width = left + size * most + (8 + LETTER * 14 if counts else 4)
    return figure(caption, width, pitch * len(layers) + 4, parts)


def _runs(ids: Sequence[int], joined: bool) -> list[tuple[int, int]]:
    """(first id, how many) of ids that follow one another, or of each."""
    runs: list[tuple[int, int]] = []
    for number_ in ids:
        if joined and runs and number_ == sum(runs[-1]):
            runs[-1] = runs[-1][0], runs[-1][1] + 1
        else:
            runs.append((number_, 1))
    return runs
