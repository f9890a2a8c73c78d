"""Grids of cells as inline SVG: heat maps of values, strips of what was kept."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from prunecli.report.charts import LETTER, drawing
from prunecli.report.labels import told_apart
from prunecli.report.markup import Html, element, figure, join, number, scrolling
from prunecli.report.style import STEPS

MOST_CELLS = 2500
"""Of more cells than this, the values are not told one by one on pointing: the page stays small."""
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
        return f"{'d' if self.around else 'q'}{min(STEPS - 1, max(0, math.floor(share * STEPS)))}"


def scale_of(grids: Sequence[Grid]) -> Scale:
    """One scale for all: from 0 up (or down to 0), or around 0 where values lie on both sides of it."""
    values = [value for grid in grids for row in grid for value in row if value is not None]
    low, high = min(values, default=0.0), max(values, default=0.0)
    if low < 0 < high:
        most = max(-low, high)
        return Scale(-most, most, around=True)
    return Scale(min(low, 0.0), max(high, 0.0))


@dataclass(frozen=True)
class _Lattice:
    """Where the cells of a heat map lie: width and height of one, and the room for the names of rows."""

    left: float
    width: float
    height: float

    def corner(self, row: int, column: int) -> tuple[float, float]:
        """The upper left corner of a cell."""
        return self.left + self.width * column, self.height * row


def heat_map(
    caption: str,
    grid: Grid,
    rows: Sequence[str],
    columns: Sequence[str],
    scale: Scale,
    *,
    told: tuple[str, str] = ("", ""),
) -> Html:
    """Cells coloured by value, named along both sides; empty ones are grey.

    Args:
        caption: what it shows.
        grid: [rows][columns]; shorter rows end in nothing.
        rows, columns: their names.
        scale: of the colours.
        told: before the names of a row and a column where a cell's value is told: ("layer ", "head ").
    """
    across, down = _side(len(columns)), _side(len(rows))
    if len(columns) != len(rows):
        down = max(down, min(14.0, 900 / max(1, len(rows))))
    at = _Lattice(10 + LETTER * min(28, max((len(name) for name in rows), default=0)), across, down)
    longest = max((len(name) for name in columns), default=0)
    slanted = LETTER * longest > across * _every(across)
    bottom = 12 + LETTER * min(28, longest) if slanted else 18.0
    parts = [
        *_row_names(rows, at),
        *_column_names(columns, at, len(rows), slanted),
        *_cells(grid, [told[0] + name for name in rows], [told[1] + name for name in columns], scale, at),
    ]
    width, height = at.left + across * len(columns) + 12, down * len(rows) + bottom
    return figure(caption, scrolling(caption, drawing(width, height, caption, parts)))


def scale_key(scale: Scale, low: str, high: str) -> Html:
    """The colours from low to high, with what the ends mean."""
    kind = "d" if scale.around else "q"
    cells = [
        element("rect", x=float(14 * step), y=0.0, width=14.0, height=12.0, class_=f"{kind}{step}")
        for step in range(STEPS)
    ]
    ramp = element(
        "svg", *cells, viewBox=f"0 0 {14 * STEPS} 12", width=14 * STEPS, height=12, aria_hidden="true"
    )
    return element("p", join((f"{low} ", ramp, f" {high}")), class_="key")


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
    parts: list[Html] = []
    for index, layer in enumerate(layers):
        y, height = pitch * index + 2, pitch - (4 if counts else 1.5)
        gap = 1.0 if size >= 5 else 0.0
        held = set(layer.kept)
        gone = tuple(number_ for number_ in range(layer.original) if number_ not in held)
        parts += [
            element("path", d=_runs(ids, left, y, size, height, gap), class_=kind)
            for ids, kind in ((gone, "gone"), (tuple(sorted(held)), "kept"))
            if ids
        ]
        parts.append(
            element("text", layer.name, x=left - 6, y=y + height - 2, text_anchor="end", class_="soft")
        )
        if counts:
            text = f"{len(layer.kept)} of {layer.original}"
            parts.append(element("text", text, x=left + size * most + 8, y=y + height - 3, class_="soft"))
    width = left + size * most + (8 + LETTER * 14 if counts else 4)
    return figure(caption, scrolling(caption, drawing(width, pitch * len(layers) + 4, caption, parts)))


def _runs(ids: Sequence[int], left: float, y: float, size: float, height: float, gap: float) -> str:
    """One path of all cells; cells without a gap between them run together."""
    made, start = [], 0
    for end in range(1, len(ids) + 1):
        if end < len(ids) and ids[end] == ids[end - 1] + 1 and not gap:
            continue
        x, width = left + size * ids[start], size * (ids[end - 1] - ids[start] + 1) - gap
        made.append(f"M{number(x)} {number(y)}h{number(width)}v{number(height)}h-{number(width)}z")
        start = end
    return "".join(made)


def _side(cells: int) -> float:
    """Of a cell, such that so many have room."""
    if cells <= 16:
        return 22.0
    return 14.0 if cells <= 40 else 10.0 if cells <= 80 else max(3.0, 800 / cells)


def _every(size: float) -> int:
    """Every which name has room beside its cell."""
    return max(1, math.ceil(13 / size))


def _row_names(names: Sequence[str], at: _Lattice) -> list[Html]:
    short = told_apart(names, 28)
    return [
        element(
            "text",
            short[name],
            x=at.left - 6,
            y=at.height * (index + 0.5) + 4,
            text_anchor="end",
            class_="soft",
        )
        for index, name in enumerate(names)
        if index % _every(at.height) == 0
    ]


def _column_names(names: Sequence[str], at: _Lattice, rows: int, slanted: bool) -> list[Html]:
    made, short = [], told_apart(names, 28)
    for index in range(0, len(names), _every(at.width)):
        x, y = at.left + at.width * (index + 0.5), at.height * rows + (8 if slanted else 14)
        turn = f"rotate(-90 {number(x)} {number(y)}) translate(0 4)" if slanted else None
        anchor = "end" if slanted else "middle"
        text = short[names[index]]
        made.append(element("text", text, x=x, y=y, text_anchor=anchor, transform=turn, class_="soft"))
    return made


def _cells(grid: Grid, rows: Sequence[str], columns: Sequence[str], scale: Scale, at: _Lattice) -> list[Html]:
    gap = 1.0 if min(at.width, at.height) >= 8 else 0.0
    width, height = at.width - gap, at.height - gap
    told = sum(len(row) for row in grid) <= MOST_CELLS
    made: list[Html] = []
    paths: dict[str, list[str]] = {}
    for line, row in enumerate(grid):
        for column, value in enumerate(row):
            kind = "gone" if value is None else scale.step(value)
            x, y = at.corner(line, column)
            if told:
                text = "nothing" if value is None else f"{value:.4g}"
                name = element("title", f"{rows[line]}, {columns[column]}: {text}")
                made.append(element("rect", name, x=x, y=y, width=width, height=height, class_=kind))
            else:
                box = f"M{number(x)} {number(y)}h{number(width)}v{number(height)}h-{number(width)}z"
                paths.setdefault(kind, []).append(box)
    return made + [element("path", d="".join(boxes), class_=kind) for kind, boxes in sorted(paths.items())]
