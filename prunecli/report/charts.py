"""Charts as inline SVG: points and lines, bars with whiskers, bars of parts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from prunecli.report.drawing import LETTER, box, figure, key, marker, path, sample, shortened, text
from prunecli.report.markup import Html, element, number
from prunecli.report.style import SERIES

WIDTH, HEIGHT = 440.0, 300.0
LEFT, RIGHT, TOP, BOTTOM = 64.0, WIDTH - 18.0, 14.0, HEIGHT - 44.0
"""The edges of the axes."""
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
    for index, line in enumerate(shown):
        if line.joined and len(line.points) > 1:
            corners = " ".join(f"{number(x_axis.at(p.x))},{number(y_axis.at(p.y))}" for p in line.points)
            parts.append(element("polyline", points=corners, class_=f"l{index % SERIES}", stroke_width="1.5"))
    for index, point in points:
        title = f"{point.name}: {x_name} {point.x:,.6g}, {y_name} {point.y:,.6g}"
        parts.append(marker(index, x_axis.at(point.x), y_axis.at(point.y), title))
    if named and len(points) <= LABELLED:
        parts += _names(list(dict.fromkeys((p.name, x_axis.at(p.x), y_axis.at(p.y)) for _, p in points)))
    marks = [(sample(14, 12, marker(index, 7, 6)), line.name) for index, line in enumerate(shown)]
    return figure(caption, WIDTH, HEIGHT, parts, key=key(marks) if len(marks) > 1 else "", fits=True)


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


def _names(points: Sequence[tuple[str, float, float]]) -> list[Html]:
    """The names beside their points, those left out that would cover another or leave the chart."""
    taken = [(x - 5, y - 5, x + 5, y + 5) for _, x, y in points]
    parts = []
    short = shortened([name for name, _, _ in points], 24)
    for name, x, y in points:
        width = LETTER * len(short[name])
        for left, base in ((x + 7, y - 6), (x - 7 - width, y - 6), (x + 7, y + 15), (x - 7 - width, y + 15)):
            room = (left, base - 11, left + width, base + 3)
            inside = room[0] >= LEFT and room[2] <= WIDTH and room[1] >= 0 and room[3] <= BOTTOM + 2
            if inside and not any(_overlap(room, other) for other in taken):
                taken.append(room)
                parts.append(text(left, base, short[name]))
                break
    return parts


def _overlap(first: tuple[float, float, float, float], second: tuple[float, float, float, float]) -> bool:
    return first[0] < second[2] and second[0] < first[2] and first[1] < second[3] and second[1] < first[3]


def bars(caption: str, rows: Sequence[Bar], value_name: str) -> Html:
    """A horizontal bar per row from 0, with a whisker and the value in words."""
    axis = _Axis(
        value_name,
        ticks(0.0, max(0.0, *(max(row.value, row.high) for row in rows)) or 1.0),
        start := min(220.0, 14 + LETTER * max(len(row.name) for row in rows)),
        start + 300,
    )
    short = shortened([row.name for row in rows], 32)
    parts = []
    for index, row in enumerate(rows):
        y = 4 + 24.0 * index
        end, low, high = (axis.at(max(0.0, value)) for value in (row.value, row.low, row.high))
        parts += [
            text(start - 8, y + 13, short[row.name], anchor="end", title=row.name),
            box(start, y + 2, max(end - start, 0.5), 14.0, "s0"),
            path("M", low, y + 9, "H", high, kind="whisker"),
            text(max(end, high) + 6, y + 13, row.text, "soft"),
        ]
    width = axis.end + 12 + LETTER * max(len(row.text) for row in rows)
    return figure(caption, width, 8 + 24.0 * len(rows), parts, title=f"{caption}. {value_name}.")


def stacked_bars(caption: str, rows: Sequence[StackedBar], names: Sequence[str]) -> Html:
    """A horizontal bar per row, made of parts that are `names` in the key."""
    start = 14 + LETTER * min(32, max(len(row.name) for row in rows))
    most = max(sum(size for _, size in row.parts) for row in rows) or 1
    short = shortened([row.name for row in rows], 32)
    parts = []
    for index, row in enumerate(rows):
        x, y = start, 4 + 22.0 * index
        parts.append(text(x - 8, y + 13, short[row.name], anchor="end"))
        for place, (title, size) in enumerate(row.parts):
            if title:
                width = 420.0 * size / most
                parts.append(box(x, y + 2, max(width - 1, 0.0), 14.0, f"s{place}", title))
                x += width
        parts.append(text(x + 6, y + 13, row.text, "soft"))
    samples = [(sample(12, 12, box(0, 0, 12, 12, f"s{place}")), name) for place, name in enumerate(names)]
    return figure(caption, start + 510, 8 + 22.0 * len(rows), parts, key=key(samples))
