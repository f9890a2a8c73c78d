"""Charts as inline SVG: points and lines, bars with whiskers, bars of parts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

from prunecli.report.drawing import (
    LETTER,
    box,
    figure,
    key,
    marker,
    path,
    sample,
    series_key,
    shortened,
    text,
)
from prunecli.report.markup import Html, element, number
from prunecli.report.style import SERIES

Area: TypeAlias = "tuple[float, float, float, float]"
"""Left, top, right and bottom."""

WIDTH, HEIGHT = 440.0, 300.0
LEFT, RIGHT, TOP, BOTTOM = 64.0, WIDTH - 18.0, 14.0, HEIGHT - 44.0
"""The edges of the axes."""
ROW = 42
"""Height of a bar and of the text above it."""
LABELLED = 10
"""With more points than this, names appear on pointing only: they would cover one another."""


@dataclass(frozen=True)
class Point:
    """A point of a chart and its name."""

    x: float
    y: float
    name: str


@dataclass(frozen=True)
class Series:
    """Points that belong together.

    Attributes:
        name: for the key.
        points: in the order in which a line joins them.
        joined: whether a line does.
    """

    name: str
    points: tuple[Point, ...]
    joined: bool = False


@dataclass(frozen=True)
class Bar:
    """A bar with a whisker from `low` to `high`."""

    name: str
    value: float
    low: float
    high: float
    text: str


@dataclass(frozen=True)
class StackedBar:
    """A bar of parts one after another: (what is told of each on pointing, its size), in the order of the key."""

    name: str
    parts: tuple[tuple[str, float], ...]
    text: str


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers from at most `low` to at least `high`, about `count` of them."""
    if high - low <= 1e-9 * max(abs(low), abs(high), 1e-290):  # no two numbers could be told apart
        margin = abs(low) * 0.1 or 1.0
        low, high = low - margin, high + margin
    rough = (high - low) / count
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [position * step for position in range(first, last + 1)]


def tick_text(value: float, step: float) -> str:
    """A tick's number with as many digits as its step needs."""
    if value and (abs(value) >= 1e7 or abs(step) < 1e-5):
        return f"{value:.3g}"
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    if abs(round(step, digits) - step) > step * 1e-3:  # 2.5, 0.25
        digits += 1
    return f"{value:,.{digits}f}"


@dataclass(frozen=True)
class _Axis:
    """Values along a line of the drawing, from the pixel `start` to `end`."""

    name: str
    ticks: Sequence[float]
    start: float
    end: float

    def at(self, value: float) -> float:
        """The pixel of a value."""
        first, last = self.ticks[0], self.ticks[-1]
        return self.start + (self.end - self.start) * (value - first) / (last - first)

    def labels(self) -> list[tuple[float, str]]:
        """The pixel and the text of each tick."""
        return [(self.at(value), tick_text(value, self.ticks[1] - self.ticks[0])) for value in self.ticks]

    def title(self) -> str:
        """The name, and where the axis begins if above 0."""
        return f"{self.name} (axis from {self.labels()[0][1]})" if self.ticks[0] > 0 else self.name


def chart(
    caption: str, series: Sequence[Series], x_name: str, y_name: str, *, named: bool = True, zero: str = ""
) -> Html:
    """Points against two linear axes, with a key where there are several series.

    Series without points are left out; each has a colour and a mark of its own. With `named`, points have their
    names beside them while they are few. An axis that is named in `zero` ("x", "y", "xy") begins at 0, so that lengths
    along it compare sizes; another one that begins above says where.
    """
    shown = [line for line in series if line.points]
    points = [(index, point) for index, line in enumerate(shown) for point in line.points]
    across, upwards = (point.x for _, point in points), (point.y for _, point in points)
    x_axis = _Axis(x_name, _ticks(list(across), "x" in zero), LEFT, RIGHT)
    y_axis = _Axis(y_name, _ticks(list(upwards), "y" in zero), BOTTOM, TOP)
    parts = _axes(x_axis, y_axis)
    lines: list[Area] = []
    for index, line in enumerate(shown):
        if line.joined and len(line.points) > 1:
            lines += _along(line, x_axis, y_axis)
            corners = " ".join(f"{number(x_axis.at(p.x))},{number(y_axis.at(p.y))}" for p in line.points)
            parts.append(element("polyline", points=corners, class_=f"l{index % SERIES}", stroke_width="1.5"))
    for index, point in points:
        title = f"{point.name}: {x_name} {point.x:,.6g}, {y_name} {point.y:,.6g}"
        parts.append(marker(index, x_axis.at(point.x), y_axis.at(point.y), title))
    places = dict.fromkeys((p.name, x_axis.at(p.x), y_axis.at(p.y)) for _, p in points)
    if named and len(places) <= LABELLED:
        parts += _names(list(places), lines)
    marks = series_key((index, line.name) for index, line in enumerate(shown)) if len(shown) > 1 else ""
    return figure(caption, WIDTH, HEIGHT, parts, key=marks, fits=True)


def _ticks(values: list[float], from_zero: bool) -> list[float]:
    return ticks(min([0.0, *values] if from_zero else values), max(values))


def _axes(across: _Axis, upwards: _Axis) -> list[Html]:
    parts = []
    for index, (y, label) in enumerate(upwards.labels()):
        parts.append(path("M", LEFT, y, "H", RIGHT, kind="grid" if index else "axis"))
        parts.append(text(LEFT - 7, y + 4, label, "soft", anchor="end"))
    for x, label in across.labels():
        parts.append(path("M", x, BOTTOM, "v4", kind="axis"))
        parts.append(text(x, BOTTOM + 17, label, "soft", anchor="middle"))
    middle = (TOP + BOTTOM) / 2
    turn = f"rotate(-90 12 {number(middle)})"
    return [
        *parts,
        text((LEFT + RIGHT) / 2, HEIGHT - 7, across.title(), anchor="middle"),
        text(12.0, middle, upwards.title(), anchor="middle", turn=turn),
    ]


def _names(points: Sequence[tuple[str, float, float]], lines: Sequence[Area]) -> list[Html]:
    """The names beside their points, off the lines if there is room; one that would cover another is left out."""
    taken = [(x - 5, y - 5, x + 5, y + 5) for _, x, y in points]
    parts = []
    short = shortened([name for name, _, _ in points], 24)
    for name, x, y in points:
        width = LETTER * len(short[name])
        right, left, middle = x + 7, x - 7 - width, x - width / 2
        corners = [(side, base) for base in (y - 6, y + 15) for side in (right, left)]
        places = [*corners, (middle, y - 9), (middle, y + 18), (right, y + 4), (left, y + 4)]
        rooms = {(left, base): (left, base - 11, left + width, base + 3) for left, base in places}
        free = [
            place
            for place, (left, top, right, bottom) in rooms.items()
            if left >= LEFT and right <= WIDTH - 8 and top >= 0 and bottom <= BOTTOM + 2
            if not any(_overlap(rooms[place], other) for other in taken)
        ]
        clear = [place for place in free if not any(_overlap(rooms[place], line) for line in lines)]
        for place in (clear or free)[:1]:
            taken.append(rooms[place])
            parts.append(text(*place, short[name], "name"))
    return parts


def _along(line: Series, x_axis: _Axis, y_axis: _Axis) -> list[Area]:
    """Small areas that cover the line."""
    places = [(x_axis.at(point.x), y_axis.at(point.y)) for point in line.points]
    steps = [(step / 24, ends) for ends in pairwise(places) for step in range(25)]
    dots = [(x + t * (x1 - x), y + t * (y1 - y)) for t, ((x, y), (x1, y1)) in steps]
    return [(x - 1, y - 1, x + 1, y + 1) for x, y in dots]


def _overlap(first: Area, second: Area) -> bool:
    return first[0] < second[2] and second[0] < first[2] and first[1] < second[3] and second[1] < first[3]


def bars(caption: str, rows: Sequence[Bar], value_name: str) -> Html:
    """A horizontal bar per row from 0, with a whisker, below its name and the value in words."""
    most = max(0.0, *(max(row.value, row.high) for row in rows)) or 1.0
    drawn = []
    for index, row in enumerate(rows):
        end, low, high = (percent(100 * max(0.0, value) / most) for value in (row.value, row.low, row.high))
        y = ROW * index + 20
        bar = element("rect", x=0, y=y, width=end, height=14, class_="s0")
        whisker = element("line", x1=low, x2=high, y1=y + 7, y2=y + 7, class_="whisker")
        drawn.append((row.name, row.text, [bar, whisker]))
    return _rows(caption, drawn, title=f"{caption}. {value_name}.")


def stacked_bars(caption: str, rows: Sequence[StackedBar], names: Sequence[str]) -> Html:
    """A horizontal bar per row, made of parts that are `names` in the key, below its name and the value in words."""
    most = max(sum(size for _, size in row.parts) for row in rows) or 1
    drawn = []
    for index, row in enumerate(rows):
        x, parts = 0.0, []
        for place, (title, size) in enumerate(row.parts):
            width = 100 * size / most
            if title:
                where = {"x": percent(x), "y": ROW * index + 20, "width": percent(width), "height": 14}
                parts.append(element("rect", element("title", title), **where, class_=f"s{place}"))
            x += width
        drawn.append((row.name, row.text, parts))
    samples = [(sample(12, 12, box(0, 0, 12, 12, f"s{place}")), name) for place, name in enumerate(names)]
    return _rows(caption, drawn, key=key(samples))


def _rows(
    caption: str, rows: Sequence[tuple[str, str, list[Html]]], *, key: str = "", title: str = ""
) -> Html:
    """(name, value in words, bar) below one another, in percent of the width that the page allows."""
    short = shortened([name for name, _, _ in rows], 28)
    parts = [element("title", title or caption)]
    for index, (name, value, bar) in enumerate(rows):
        y = ROW * index + 14
        parts.append(text(0, y, short[name], title=name))
        parts.append(element("text", value, x="100%", y=y, text_anchor="end", class_="soft"))
        parts += bar
    drawn = element("svg", *parts, role="img", width="100%", height=ROW * len(rows))
    return element("figure", element("figcaption", caption), drawn, *([key] if key else []), class_="rows")


def percent(share: float) -> str:
    """'12.5%' of the width of a drawing."""
    return f"{number(share)}%"
