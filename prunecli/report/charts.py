"""The charts of the report page and of `--plot`, declared with Vega-Altair.

Each chart function takes a caption first and returns a `Picture`. Altair is an optional dependency: without it, the
pictures are empty and the page shows its tables alone.
"""

import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import pandas as pd
from scipy.cluster import hierarchy

from prunecli.errors import PruneError

try:
    import altair as alt
    from altair.utils.schemapi import debug_mode
except ImportError:
    alt = None

VEGA_LITE = alt and ".".join(alt.SCHEMA_VERSION.split(".")[:2])
"""Version of Vega-Lite that Altair declares charts for."""

PACKAGES = {"altair": "altair", "vl_convert": "vl-convert-python"}
"""Module -> package that installs it."""
SUFFIXES = (".png", ".svg", ".html")
"""Kinds of files that --plot writes."""
WIDTH, HEIGHT = 420, 280
"""Pixels of a chart in a PNG or SVG; on the page, charts are as wide as the page allows."""
LETTER, LINE = 6, 13
"""Pixels of a letter's width and of a line's height in names, about."""
MOST_NAMED = 12
"""Largest number of points with their names beside them."""

MOST_CELLS = 20_000
"""A larger heat map shows means of neighbouring cells: every cell is an element of the page."""
LONGEST_NAME = 32
"""Characters of a name on an axis."""
END_OF_NAME = (
    f"length(datum.label) > {LONGEST_NAME} ? '…' + slice(datum.label, {1 - LONGEST_NAME}) : datum.label"
)
"""Vega expression for labels: a long name is cut at its start, since names differ at their ends."""


@dataclass(frozen=True)
class Picture:
    """A chart and its caption.

    Attributes:
        caption: the title.
        chart: an Altair chart, without width if it fills its container; None if Altair is not installed.
    """

    caption: str
    chart: Any

    def specification(self, width: int | str) -> dict[str, Any]:
        """Return the Vega-Lite specification, `width` wide unless the chart has a width."""
        found = {"width": width, **self.chart.to_dict(validate=False)}
        if found["width"] == "container":
            found["autosize"] = {"type": "fit-x", "contains": "padding"}
        return {key: value for key, value in found.items() if key != "config"}


@dataclass(frozen=True)
class Point:
    """A point of a line or scatter chart, with an optional error bar from `low` to `high`."""

    x: float
    y: float
    name: str
    series: str = ""
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Bar:
    """A bar, or one part of a stacked bar, with an optional error bar from `low` to `high`."""

    name: str
    value: float
    text: str
    part: str = ""
    low: float | None = None
    high: float | None = None


def missing_packages() -> str:
    """Return the names of the packages that charts need and that are not installed, for `pip install`."""
    return " ".join(package for module, package in PACKAGES.items() if find_spec(module) is None)


def require_packages() -> None:
    """Check before a long computation that its plot can be drawn.

    Raises:
        PruneError: Altair or vl-convert is not installed.
    """
    if missing := missing_packages():
        raise PruneError(
            f"A plot needs packages that are not installed: {missing}.", f"pip install {missing}"
        )


def _drawn(function: Callable[..., Any]) -> Callable[..., Picture]:
    """Turn a function from data to a chart into one that returns a `Picture`."""

    @functools.wraps(function)
    def picture(caption: str, *arguments: Any, **options: Any) -> Picture:
        if alt is None:
            return Picture(caption, None)
        with debug_mode(False):  # validation takes half of the time; the tests validate
            return Picture(caption, function(*arguments, **options))

    return picture


def _chart(rows: Iterable[dict[str, Any]]) -> Any:
    """Return a chart of inline data without empty values, numbers with six digits."""
    values = [
        {
            name: float(f"{value:.6g}") if isinstance(value, float) else value
            for name, value in row.items()
            if value is not None
        }
        for row in rows
    ]
    return alt.Chart(alt.InlineData(values=values))


def _legend(**options: Any) -> Any:
    return alt.Legend(orient="bottom", title=None, labelLimit=400, **options)


def colour_range(frames: Iterable[pd.DataFrame]) -> tuple[float, float]:
    """Return the ends of a colour scale for several heat maps.

    The scale begins or ends at 0; if values lie on both sides of 0, it is symmetric.
    """
    values = np.concatenate([[0.0], *(frame.to_numpy(float).ravel() for frame in frames)])
    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    return (-max(-low, high), max(-low, high)) if low < 0 < high else (low, high)


@_drawn
def heat_map(
    frame: pd.DataFrame,
    ends: tuple[float, float] = (0.0, 1.0),
    *,
    titles: tuple[str, str] = ("", ""),
    dropped: pd.DataFrame | None = None,
    has_legend: bool = True,
) -> Any:
    """Draw cells coloured by value. Cells without a value are blank.

    Args:
        frame: values; the index and the columns are the names of rows and columns.
        ends: the values at the ends of the colour scale. A scale with a negative and a positive end has two colours.
        titles: names of the two axes, such as ("layer", "head").
        dropped: whether a cell has a stroke through it, in the form of `frame`.
        has_legend: whether to show the colour scale.
    """
    values = frame.astype(float).rename(str).rename(str, axis=1)
    while values.size > MOST_CELLS:
        is_wide = values.shape[1] >= values.shape[0]
        values = values.T if is_wide else values
        pairs = values.groupby(np.arange(len(values)) // 2)
        values = pairs.mean().set_axis(values.index[::2])
        values = values.T if is_wide else values
    if values.shape != frame.shape:
        dropped = None
    down, across = list(values.index), list(values.columns)
    names = titles[0] or "row", titles[1] or "column"
    states = np.full(values.shape, None) if dropped is None else np.where(dropped, "dropped", "kept")
    cells = [
        {"row": down[line], "column": across[place], "value": value, "state": states[line, place]}
        for (line, place), value in np.ndenumerate(values.to_numpy())
        if not math.isnan(value)
    ]
    width, height = (_cell_size(len(names)) for names in (across, down))
    height = height if len(across) == len(down) else max(height, min(14, 900 // max(1, len(down))))
    gap = 0.06 if min(width, height) >= 8 else 0
    axis = {"labelExpr": END_OF_NAME, "labelOverlap": True, "ticks": False, "domain": False}
    x, y = (
        side.scale(domain=labels, paddingInner=gap).axis(**axis).title(title or None)
        for side, labels, title in ((alt.X("column:O"), across, titles[1]), (alt.Y("row:O"), down, titles[0]))
    )
    x["axis"]["labelAngle"] = 0 if all(map(str.isdigit, across)) else -90
    base = _chart(cells).encode(x, y)
    colour = alt.Scale(domain=list(ends), range="diverging" if ends[0] < 0 < ends[1] else "heatmap")
    told = [
        alt.Tooltip("row:O", title=names[0]),
        alt.Tooltip("column:O", title=names[1]),
        alt.Tooltip("value:Q", format=".4~g"),
    ]
    if dropped is not None:
        told.append(alt.Tooltip("state:N"))
    base = base.encode(tooltip=told)
    layers = [
        base.mark_rect(stroke=None, strokeWidth=0).encode(
            color=alt.Color(
                "value:Q",
                scale=colour,
                legend=_legend(gradientLength=160, format=".3~g") if has_legend else None,
            )
        )
    ]
    if dropped is not None:
        stroke = base.mark_point(shape="M-1,-1L1,1", size=min(width, height) ** 2)
        layers.append(stroke.transform_filter("datum.state == 'dropped'"))
    return alt.layer(*layers).properties(width=max(40, width * len(across)), height=height * len(down))


def _cell_size(count: int) -> int:
    """Return the side of a cell in pixels for a heat map of `count` rows or columns."""
    return 22 if count <= 16 else 14 if count <= 40 else 10 if count <= 80 else max(3, 800 // count)


def kept_of(counts: Sequence[tuple[int, int]]) -> str | None:
    """Format the sum of (kept, original) over layers: '288 of 1,536', or '1,536' if nothing was removed."""
    if not counts:
        return None
    kept, whole = map(sum, zip(*counts, strict=True))
    return f"{kept:,}" if kept == whole else f"{kept:,} of {whole:,}"


def kept_units(title: str, layers: Sequence[tuple[str, Collection[int], int]], unit: str) -> Picture:
    """Draw a row for each layer (name, kept ids, original number); kept units stand out, removed ones are faint."""
    rows = {
        f"{name}: {len(kept)} of {original}": pd.Series([float(number in kept) for number in range(original)])
        for name, kept, original in layers
    }
    caption = f"{title}: {kept_of([(len(kept), original) for _, kept, original in layers])} {unit}s"
    return heat_map(caption, pd.DataFrame(rows).T, titles=("layer", unit), has_legend=False)


@_drawn
def curves(
    points: Sequence[Point],
    x_title: str,
    y_title: str,
    *,
    joined: Collection[str] | None = None,
    references: Collection[float] = (),
    y_from_zero: bool = False,
    x_ticks: Sequence[float] = (),
) -> Any:
    """Draw points, and lines through the points of each series. The x axis begins at 0.

    Args:
        points: in the order in which lines join them. Each series has a colour and a shape.
        x_title, y_title: titles of the axes.
        joined: series whose points are joined by a line; None: all.
        references: y values of thin horizontal lines.
        y_from_zero: whether the y axis begins at 0.
        x_ticks: if given, the x axis is logarithmic and has these ticks.
    """
    series = list(dict.fromkeys(point.series for point in points))
    y_axis = alt.Y("y:Q", title=y_title, scale=alt.Scale(zero=y_from_zero))
    x_axis = alt.X("x:Q", title=x_title, scale=alt.Scale(zero=all(p.x >= 0 for p in points)))
    if x_ticks:
        x_axis = x_axis.scale(type="log", base=2, nice=False).axis(values=list(x_ticks), format=",")
    shared = alt.Scale(domain=series)
    is_one = len(series) <= 1
    legend = None if is_one else _legend(columns=1, symbolStrokeWidth=2)
    rows = [{**asdict(p), "order": order} for order, p in enumerate(points)]
    base = _chart(rows).encode(
        x=x_axis,
        y=y_axis,
        color=alt.Color("series:N", scale=shared, legend=legend),
        tooltip=[
            alt.Tooltip("name:N"),
            *([] if is_one else [alt.Tooltip("series:N")]),
            alt.Tooltip("x:Q", title=x_title, format=",.6~g"),
            alt.Tooltip("y:Q", title=y_title, format=",.6~g"),
        ],
    )
    layers = []
    if references:
        lines = _chart({"y": y} for y in dict.fromkeys(references))
        layers.append(lines.mark_rule(style="reference").encode(y="y:Q"))
    joined = series if joined is None else joined
    if own := [row for row, point in zip(rows, points, strict=True) if point.series in joined]:
        lines = base.mark_line(strokeWidth=1.6).properties(data=_chart(own).data)
        layers.append(lines.encode(order="order:O"))
    if any(point.low is not None for point in points):
        layers.append(base.mark_rule().encode(y="low:Q", y2="high:Q"))
    shapes = alt.Shape("series:N", scale=shared, legend=legend)
    layers.append(base.mark_point(filled=True, size=60, opacity=1).encode(shape=shapes))
    places = {(point.name, point.x, point.y): point for point in points}
    if points and len({point.name for point in points}) == len(places) <= MOST_NAMED:
        for point, align, lower in _named(list(places.values())):
            names = _chart([asdict(point)])
            marks = names.mark_text(align=align, dx=7 if align == "left" else -7, dy=lower, limit=140)
            layers.append(marks.encode(x=x_axis, y=y_axis, text="name:N"))
    return alt.layer(*layers).properties(height=HEIGHT)


def _named(points: Sequence[Point]) -> Iterator[tuple[Point, str, int]]:
    """Yield each point, the alignment of its name towards the middle, and the pixels by which it is below its point.

    Names that would lie upon one another are moved down.
    """
    right, high = max(point.x for point in points) or 1.0, max(point.y for point in points)
    height = high - min(point.y for point in points) or 1.0
    taken: list[tuple[float, float, float]] = []
    for point in sorted(points, key=lambda point: -point.y):
        align = "left" if point.x <= right / 2 else "right"
        width = LETTER * len(point.name)
        start = WIDTH * point.x / right - (0 if align == "left" else width)
        place, lower = HEIGHT * (high - point.y) / height, 0
        while any(
            start < end and begin < start + width and abs(place + lower - other) < LINE
            for begin, end, other in taken
        ):
            lower += LINE
        taken.append((start, start + width, place + lower))
        yield point, align, lower


@_drawn
def bars(rows: Sequence[Bar], title: str) -> Any:
    """Draw a horizontal bar from 0 for each name; parts of one name are stacked."""
    names = list(dict.fromkeys(bar.name for bar in rows))
    parts = list(dict.fromkeys(bar.part for bar in rows))
    legend = _legend() if len(parts) > 1 else None
    base = _chart({**asdict(bar), "order": i} for i, bar in enumerate(rows)).encode(
        y=alt.Y("name:N", title=None, scale=alt.Scale(domain=names), axis=alt.Axis(labelExpr=END_OF_NAME)),
        tooltip=[
            alt.Tooltip("name:N"),
            *([alt.Tooltip("part:N")] if legend else []),
            alt.Tooltip("text:N", title=title),
        ],
    )
    drawn = base.mark_bar(height={"band": 0.7}).encode(
        x=alt.X("value:Q", title=title, axis=alt.Axis(format="~s", labelOverlap=True)),
        color=alt.Color("part:N", scale=alt.Scale(domain=parts), legend=legend),
        order=alt.Order("order:Q"),
    )
    whiskers = base.mark_rule().encode(x="low:Q", x2="high:Q")
    has_whiskers = any(bar.low is not None for bar in rows)
    return alt.layer(drawn, *([whiskers] if has_whiskers else [])).properties(height=26 * len(names))


@_drawn
def histogram(values: dict[str, Sequence[float]], x_title: str, y_title: str) -> Any:
    """Draw how often values occur, the named groups stacked on one another, and a line at 0."""
    bins = alt.Bin(maxbins=20)
    rows = [{"value": value, "series": name} for name, own in values.items() for value in own]
    legend = None if len(values) == 1 else _legend(columns=1)
    drawn = _chart(rows).mark_bar().encode(
        x=alt.X("value:Q", title=x_title, bin=bins),
        y=alt.Y("count()", title=y_title),
        color=alt.Color("series:N", scale=alt.Scale(domain=list(values)), legend=legend),
        tooltip=["series:N", alt.Tooltip("value:Q", bin=bins, title=x_title), "count()"],
    )  # fmt: skip
    zero = _chart([{"x": 0.0}]).mark_rule(style="reference").encode(x="x:Q")
    return alt.layer(drawn, zero).properties(height=HEIGHT)


@_drawn
def dendrogram(leaves: Sequence[str], linkage: Sequence[Sequence[float]], families: dict[str, str]) -> Any:
    """Draw the tree of scipy's linkage matrix, leaves on the left, each with the colour of its family.

    Args:
        leaves: names of the leaves, by number.
        linkage: rows of two clusters, their distance and their number of leaves.
        families: leaf -> family. A family has the same colour in every tree that gets the same `families`.
    """
    tree = hierarchy.dendrogram(np.asarray(linkage, float), no_plot=True)
    # scipy draws leaf n at 10 n + 5.
    edges = [
        {"cluster": number, "order": i, "x": x, "y": (y - 5) / 10, "distance": max(xs)}
        for number, (xs, ys) in enumerate(zip(tree["dcoord"], tree["icoord"], strict=True))
        for i, (x, y) in enumerate(zip(xs, ys, strict=True))
    ]
    height = alt.Scale(domain=[-0.5, len(leaves) - 0.5], reverse=True, nice=False, zero=False)
    branches = _chart(edges).mark_line(strokeWidth=1.4).encode(
        x=alt.X("x:Q", title="distance at which clusters join", axis=alt.Axis(grid=False)),
        y=alt.Y("y:Q", scale=height, axis=None),
        detail="cluster:N",
        order="order:O",
        tooltip=[alt.Tooltip("distance:Q", format=".4~g")],
    )  # fmt: skip
    rows = [{"x": 0.0, "leaf": leaves[leaf], "family": families.get(leaves[leaf])} for leaf in tree["leaves"]]
    known, held = list(dict.fromkeys(families.values())), {row["family"] for row in rows}
    own = [family for family in known if family in held]
    shared = {
        "scale": alt.Scale(domain=known),
        "legend": _legend(columns=2, values=own) if own else None,
    }
    # The dots carry the names of the leaves: without families, they have no size.
    dots = _chart(rows).mark_point(filled=True, size=60 if own else 0, opacity=1).encode(
        x="x:Q",
        y=alt.Y("leaf:N", title=None, scale=alt.Scale(domain=[row["leaf"] for row in rows]), axis=alt.Axis(
            ticks=False, domain=False, grid=False, labelPadding=8, labelExpr=END_OF_NAME
        )),
        color=alt.Color("family:N", **shared),
        shape=alt.Shape("family:N", **shared),
        tooltip=["leaf:N", *(["family:N"] if own else [])],
    )  # fmt: skip
    return alt.layer(branches, dots).resolve_scale(y="independent").properties(height=20 * len(leaves))
