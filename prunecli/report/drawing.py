"""The kit of all drawings: text, boxes and paths of an SVG, its key, and names short enough for their room."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise

from prunecli.report.markup import Html, element, join, number, scrolling
from prunecli.report.style import SERIES

LETTER = 7.2
"""Width of a letter, in pixels: the average of a wide font."""
_PARTIAL_WORD = re.compile(r"(\d+\.)?\w*$")
"""A word or number at the end, of which the rest may differ."""


def text(
    x: float,
    y: float,
    content: str,
    kind: str | None = None,
    *,
    anchor: str | None = None,
    turn: str | None = None,
    title: str = "",
) -> Html:
    """`content` on the base line `y`; `title` is told on pointing, `anchor` says where in it `x` lies."""
    return element("text", *_title(title), content, x=x, y=y, text_anchor=anchor, transform=turn, class_=kind)


def box(x: float, y: float, width: float, height: float, kind: str, title: str = "") -> Html:
    """A filled rectangle; `title` is told on pointing."""
    return element("rect", *_title(title), x=x, y=y, width=width, height=height, class_=kind)


def path(*steps: str | float, kind: str, title: str = "") -> Html:
    """A path: its commands and coordinates one after another; `title` is told on pointing."""
    return element("path", *_title(title), d=outline(*steps), class_=kind)


def outline(*steps: str | float) -> str:
    """The text of a path: 'M', 1.0, 2.5, 'H', 3.0 -> 'M1 2.5H3'."""
    words: list[str] = []
    for before, step in pairwise(("", *steps)):
        words.append(
            step if isinstance(step, str) else f"{'' if isinstance(before, str) else ' '}{number(step)}"
        )
    return "".join(words)


def cell(x: float, y: float, width: float, height: float) -> str:
    """The text of a path around a rectangle."""
    return outline("M", x, y, "h", width, "v", height, "h-", width, "z")


def marker(series: int, x: float, y: float, title: str = "") -> Html:
    """A series' own mark around (x, y): circle, square, triangle or diamond, in its colour."""
    shapes: tuple[tuple[str | float, ...], ...] = (
        ("M", x - 4, y, "a4 4 0 1 0 8 0a4 4 0 1 0 -8 0z"),
        ("M", x - 3.6, y - 3.6, "h7.2v7.2h-7.2z"),
        ("M", x, y - 4.6, "l4.6 8.2h-9.2z"),
        ("M", x, y - 5, "l5 5l-5 5l-5 -5z"),
    )
    shape = shapes[(series + series // SERIES) % len(shapes)]
    return path(*shape, kind=f"s{series % SERIES}", title=title)


def _title(title: str) -> list[Html]:
    return [element("title", title)] if title else []


def figure(
    caption: str,
    width: float,
    height: float,
    parts: Sequence[str],
    *,
    key: str = "",
    fits: bool = False,
    title: str = "",
) -> Html:
    """A drawing below its caption.

    Args:
        caption: what it shows.
        width, height: in pixels.
        parts: of the SVG.
        key: what stands below it.
        fits: whether it shrinks with a narrow page; else it scrolls.
        title: what is told on pointing; default: `caption`.
    """
    drawn = svg(
        width, height, element("title", title or caption), *parts, role="img", class_="fit" if fits else None
    )
    return element(
        "figure",
        element("figcaption", caption),
        drawn if fits else scrolling(caption, drawn),
        *([key] if key else []),
    )


def svg(width: float, height: float, *parts: str, **attributes: object) -> Html:
    """An SVG of this size."""
    view = f"0 0 {number(width)} {number(height)}"
    return element("svg", *parts, viewBox=view, width=width, height=height, **attributes)


def sample(width: float, height: float, *parts: str) -> Html:
    """A small drawing inside of a key."""
    return svg(width, height, *parts, aria_hidden="true")


def key(samples: Iterable[tuple[Html, str]]) -> Html:
    """A line that says what each sample stands for."""
    return element("ul", *(element("li", join(pair)) for pair in samples), class_="key")


def series_key(names: Iterable[tuple[int, str]]) -> Html:
    """The mark and name of each series (its number, its name)."""
    return key((sample(14, 12, marker(series, 7, 6)), name) for series, name in names)


def shortened(names: Iterable[str], letters: int) -> dict[str, str]:
    """Name -> it, or where it is longer than `letters` a shorter form that no other name has.

    What all long ones begin with goes first, then what they end with, in whole words; then the middle of what is still
    too long, as far as no two become alike.
    """
    whole = list(dict.fromkeys(names))
    long = [name for name in whole if len(name) > letters]
    shared = long if len(long) > 1 else []
    front = len(_PARTIAL_WORD.sub("", _common_start(shared)))
    back = len(_PARTIAL_WORD.sub("", _common_start([name[::-1] for name in shared])))
    for room in range(letters, max(map(len, long), default=letters)):
        short = {name: _fitted(name, front, back, room) if name in long else name for name in whole}
        if len(set(short.values())) == len(whole):
            return short
    return {name: name for name in whole}


def _common_start(names: Sequence[str]) -> str:
    first, last = min(names, default=""), max(names, default="")
    end = next(
        (i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last))
    )
    return first[:end]


def _fitted(name: str, front: int, back: int, letters: int) -> str:
    """`name` without its shared beginning; if that is not enough, without its shared end; then without its middle."""
    short = f"…{name[front:]}" if front > 1 else name
    if len(short) > letters and 1 < back < len(short) - 1:
        short = f"{short[:-back]}…"
    half = (letters - 1) // 2
    return short if len(short) <= letters else f"{short[: letters - 1 - half]}…{short[-half:]}"
