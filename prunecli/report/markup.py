"""HTML and SVG as values: text is escaped by construction, so that no name in a file can become markup."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

EMPTY_ELEMENTS = frozenset({"meta", "link", "br"})
"""HTML elements without an end tag."""

NOTHING = "–"
"""A cell without a value."""
Row = TypeVar("Row")
Value = TypeVar("Value")
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9-]*\Z")


class Html(str):
    """Markup. Every other `str` is text, and is escaped where it meets markup."""

    __slots__ = ()


def escape(text: str) -> Html:
    """`text` for an element's content or a quoted attribute.

    What cannot be shown (control characters, lone surrogates, marks that turn the direction of writing) becomes U+FFFD:
    none of it may hide or reorder a name, or make a page that UTF-8 cannot hold.
    """
    shown = "".join(mark if mark.isprintable() or mark in "\n\t" else "\ufffd" for mark in text)
    return Html(html.escape(shown, quote=True))


def element(name: str, *children: str, **attributes: object) -> Html:
    """`<name attributes>children</name>`.

    Args:
        name: of the element.
        children: markup as it is, other text escaped.
        attributes: `class_` stands for `class`, `_` for `-`; None and False are left out, True has no value.

    Raises:
        ValueError: a name that no element or attribute can have.
    """
    fields = "".join(_attribute(key, value) for key, value in attributes.items())
    if not _NAME.match(name):
        raise ValueError(f"no name of an element: {name!r}")
    if name in EMPTY_ELEMENTS:
        return Html(f"<{name}{fields}>")
    return Html(f"<{name}{fields}>{join(children)}</{name}>")


def _attribute(key: str, value: object) -> str:
    name = key.rstrip("_").replace("_", "-")
    if not _NAME.match(name):
        raise ValueError(f"no name of an attribute: {key!r}")
    if value is None or value is False:
        return ""
    if value is True:
        return f" {name}"
    return f' {name}="{escape(number(value) if isinstance(value, float) else str(value))}"'


def join(children: Iterable[str]) -> Html:
    """The children one after another; text escaped."""
    return Html("".join(child if isinstance(child, Html) else escape(child) for child in children))


def number(value: float) -> str:
    """A coordinate, without needless zeros: 12.50 -> '12.5'."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def table(
    caption: str,
    rows: Sequence[Row],
    columns: Mapping[str, Callable[[Row], str | None]],
    text_columns: int = 1,
) -> Html:
    """A table with a caption, in a box of its own that scrolls where the page is narrow.

    Args:
        caption: what it shows.
        rows: what each row is about.
        columns: their names -> the text of a row's cell; the first names the row. A cell may be None, and a column
            without any cell is left out.
        text_columns: so many columns are aligned left, the others right.
    """
    cells = {name: [cell(row) for row in rows] for name, cell in columns.items()}
    kinds = {name: None if index < text_columns else "n" for index, name in enumerate(cells)}
    first = next(iter(cells))
    shown = [name for name in cells if name == first or any(cell is not None for cell in cells[name])]
    head = (element("th", name, scope="col", class_=kinds[name]) for name in shown)
    body = (
        element(
            "tr",
            element("th", cells[first][index] or NOTHING, scope="row"),
            *(
                element("td", NOTHING if (cell := cells[name][index]) is None else cell, class_=kinds[name])
                for name in shown[1:]
            ),
        )
        for index in range(len(rows))
    )
    drawn = element(
        "table",
        element("caption", caption),
        element("thead", element("tr", *head)),
        element("tbody", *body),
    )
    return scrolling(caption, drawn)


def maybe(form: Callable[[Value], str], value: Value | None) -> str | None:
    """A cell of a value that may be unknown."""
    return None if value is None else form(value)


def scrolling(label: str, *children: str) -> Html:
    """A box that scrolls by itself, by keyboard too, where its content is wider than the page."""
    return element("div", *children, class_="scroll", role="region", aria_label=label, tabindex="0")


def row_of(*drawings: str) -> Html:
    """Drawings beside one another, as far as the page is wide."""
    return element("div", *drawings, class_="charts")


def millions(parameters: int) -> str:
    """2430000 -> '2.43M'."""
    return f"{parameters / 1e6:,.2f}M"
