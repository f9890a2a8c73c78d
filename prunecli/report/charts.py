"""Charts as inline SVG: points and lines, bars with whiskers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from prunecli.report.labels import told_apart
from prunecli.report.markup import Html, element, figure, join, number, scrolling
from prunecli.report.style import SERIES

WIDTH, HEIGHT = 440.0, 300.0
LEFT, RIGHT, TOP, BOTTOM = 64.0, 18.0, 14.0, 44.0
LABELLED = 10
"""With more points than this, names appear on pointing only: they would cover one another."""
LETTER = 7.2
"""Width of a letter of the charts, in pixels: the average of a wide font."""


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


def chart(
    caption: str, series: Sequence[Series], x_name: str, y_name: str, *, named: bool = True, zero: str = ""
) -> Html:
    """Points against two linear axes, with a key where there are several series.

    Series without points are left out; each has a colour and a mark of its own. With `named`, points have their
    names beside them while they are few. An axis that is named in `zero` ("x", "y", "xy") begins at 0, so that lengths
    along it compare sizes; another one that begins above says where.
    """
    held = [one for one in series if one.points]
    points = [point for one in held for point in one.points]
    across = ticks(min([p.x for p in points] + [0.0] * ("x" in zero)), max(p.x for p in points))
    upwards = ticks(min([p.y for p in points] + [0.0] * ("y" in zero)), max(p.y for p in points))

    def place(point: Point) -> tuple[float, float]:
        x = LEFT + (WIDTH - LEFT - RIGHT) * (point.x - across[0]) / (across[-1] - across[0])
        y = HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (point.y - upwards[0]) / (upwards[-1] - upwards[0])
        return x, y

    parts = [
        element("title", caption),
        *_axes(across, upwards, _beginning(x_name, across), _beginning(y_name, upwards)),
    ]
    placed = [(index, point, place(point)) for index, one in enumerate(held) for point in one.points]
    for index, one in enumerate(held):
        if one.joined and len(one.points) > 1:
            path = " ".join(",".join(map(number, place(point))) for point in one.points)
            parts.append(element("polyline", points=path, class_=f"l{index % SERIES}", stroke_width="1.5"))
    for index, point, (x, y) in placed:
        name = element("title", f"{point.name}: {x_name} {point.x:,.6g}, {y_name} {point.y:,.6g}")
        parts.append(element("path", name, d=_mark(index, x, y), class_=f"s{index % SERIES}"))
    if named and len(points) <= LABELLED:
        parts += _names(list(dict.fromkeys((point.name, *where) for _, point, where in placed)))
    drawing = _svg(WIDTH, HEIGHT, parts, fit=True)
    return figure(caption, drawing, *([_key([one.name for one in held])] if len(held) > 1 else []))


def _beginning(name: str, places: Sequence[float]) -> str:
    """An axis' name, and where it begins if above 0."""
    return f"{name} (axis from {tick_text(places[0], places[1] - places[0])})" if places[0] > 0 else name


def bars(caption: str, rows: Sequence[Bar], value_name: str) -> Html:
    """A horizontal bar per row from 0, with a whisker and the value in words."""
    high = ticks(0.0, max(0.0, *(max(row.value, row.high) for row in rows)) or 1.0)[-1]
    left = min(220.0, 14 + LETTER * max(len(row.name) for row in rows))
    right = 12 + LETTER * max(len(row.text) for row in rows)
    length, pitch = 300.0, 24.0
    parts = [element("title", f"{caption}. {value_name}.")]
    short = told_apart([row.name for row in rows], 32)
    for number_, row in enumerate(rows):
        y = 4 + pitch * number_
        end, low, top = (left + length * max(0.0, v) / high for v in (row.value, row.low, row.high))
        parts += [
            element(
                "text",
                element("title", row.name),
                short[row.name],
                x=left - 8,
                y=y + 13,
                text_anchor="end",
            ),
            element("rect", x=left, y=y + 2, width=max(end - left, 0.5), height=14.0, class_="s0"),
            element("path", d=f"M{number(low)} {number(y + 9)}H{number(top)}", class_="whisker"),
            element("text", row.text, x=max(end, top) + 6, y=y + 13, class_="soft"),
        ]
    width, height = left + length + right, 8 + pitch * len(rows)
    return figure(caption, scrolling(caption, _svg(width, height, parts)))


def _svg(width: float, height: float, parts: Sequence[str], *, fit: bool = False) -> Html:
    box = f"0 0 {number(width)} {number(height)}"
    return element(
        "svg", *parts, viewBox=box, width=width, height=height, role="img", class_="fit" if fit else None
    )


def drawing(width: float, height: float, title: str, parts: Sequence[str]) -> Html:
    """An SVG of this size that says what it is."""
    return _svg(width, height, [element("title", title), *parts])


def _axes(across: Sequence[float], upwards: Sequence[float], x_name: str, y_name: str) -> list[Html]:
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    made = []
    for index, value in enumerate(upwards):
        y = bottom - (bottom - TOP) * index / (len(upwards) - 1)
        text = tick_text(value, upwards[1] - upwards[0])
        made.append(
            element(
                "path",
                d=f"M{number(LEFT)} {number(y)}H{number(right)}",
                class_="axis" if not index else "grid",
            )
        )
        made.append(element("text", text, x=LEFT - 7, y=y + 4, text_anchor="end", class_="soft"))
    for index, value in enumerate(across):
        x = LEFT + (right - LEFT) * index / (len(across) - 1)
        text = tick_text(value, across[1] - across[0])
        made.append(element("path", d=f"M{number(x)} {number(bottom)}v4", class_="axis"))
        made.append(element("text", text, x=x, y=bottom + 17, text_anchor="middle", class_="soft"))
    middle = (TOP + bottom) / 2
    made.append(element("text", x_name, x=(LEFT + right) / 2, y=HEIGHT - 7, text_anchor="middle"))
    made.append(
        element(
            "text",
            y_name,
            x=12.0,
            y=middle,
            text_anchor="middle",
            transform=f"rotate(-90 12 {number(middle)})",
        )
    )
    return made


def _mark(series: int, x: float, y: float) -> str:
    """A path of a series' own shape around (x, y): circle, square, triangle, diamond."""
    left, up = number(x), number(y)
    shapes = (
        f"M{number(x - 4)} {up}a4 4 0 1 0 8 0a4 4 0 1 0 -8 0z",
        f"M{number(x - 3.6)} {number(y - 3.6)}h7.2v7.2h-7.2z",
        f"M{left} {number(y - 4.6)}l4.6 8.2h-9.2z",
        f"M{left} {number(y - 5)}l5 5l-5 5l-5 -5z",
    )
    return shapes[(series + series // SERIES) % len(shapes)]


def _names(placed: Sequence[tuple[str, float, float]]) -> list[Html]:
    """The names beside their points, those left out that would cover another or leave the chart."""
    taken = [(x - 5, y - 5, x + 5, y + 5) for _, x, y in placed]
    made = []
    short = told_apart([name for name, _, _ in placed], 24)
    for name, x, y in placed:
        text = short[name]
        width = LETTER * len(text)
        for left, base in ((x + 7, y - 6), (x - 7 - width, y - 6), (x + 7, y + 15), (x - 7 - width, y + 15)):
            box = (left, base - 11, left + width, base + 3)
            inside = box[0] >= LEFT and box[2] <= WIDTH and box[1] >= 0 and box[3] <= HEIGHT - BOTTOM + 2
            if inside and not any(_overlap(box, other) for other in taken):
                taken.append(box)
                made.append(element("text", text, x=left, y=base))
                break
    return made


def _overlap(one: tuple[float, float, float, float], other: tuple[float, float, float, float]) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _key(names: Sequence[str]) -> Html:
    items = []
    for index, name in enumerate(names):
        mark = element("path", d=_mark(index, 7.0, 6.0), class_=f"s{index % SERIES}")
        sample = element("svg", mark, viewBox="0 0 14 12", width="14", height="12", aria_hidden="true")
        items.append(element("li", join((sample, name))))
    return element("ul", *items, class_="key")
