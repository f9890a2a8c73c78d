"""HTML and SVG as values: text is escaped by construction, so that no name in a file can become markup."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence

EMPTY_ELEMENTS = frozenset({"meta", "link", "br"})
"""HTML elements without an end tag."""

NOTHING = "–"
"""A cell without a value."""
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


def number(value: float, digits: int = 2) -> str:
    """A coordinate, without needless zeros: 12.50 -> '12.5'."""
    text = f"{value:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def table(caption: str, columns: Sequence[str], rows: Sequence[Sequence[str]], text_columns: int = 1) -> Html:
    """A table with a caption, in a box of its own that scrolls where the page is narrow.

    Args:
        caption: what it shows.
        columns: their names.
        rows: as long as `columns`; the first cell names the row.
        text_columns: so many columns are aligned left, the others right. Columns of nothing but dashes are left out.
    """
    used = [
        index for index in range(len(columns)) if index == 0 or any(row[index] != NOTHING for row in rows)
    ]
    columns, rows = [columns[index] for index in used], [[row[index] for index in used] for row in rows]
    left = [None if index < text_columns else "n" for index in used]
    head = (element("th", name, scope="col", class_=place) for name, place in zip(columns, left, strict=True))
    body = (
        element(
            "tr",
            *(
                element("th", cell, scope="row") if index == 0 else element("td", cell, class_=left[index])
                for index, cell in enumerate(row)
            ),
        )
        for row in rows
    )
    made = element(
        "table",
        element("caption", caption),
        element("thead", element("tr", *head)),
        element("tbody", *body),
    )
    return scrolling(caption, made)


def scrolling(label: str, *children: str) -> Html:
    """A box that scrolls by itself, by keyboard too, where its content is wider than the page."""
    return element("div", *children, class_="scroll", role="region", aria_label=label, tabindex="0")


def figure(caption: str, *children: str) -> Html:
    """A figure below what it shows."""
    return element("figure", element("figcaption", caption), *children)


def millions(parameters: int) -> str:
    """2430000 -> '2.43M'."""
    return f"{parameters / 1e6:,.2f}M"


def counted(count: int, name: str) -> str:
    """1, 'pair' -> '1 pair'; 2 -> '2 pairs'."""
    return f"{count:,} {name}{'' if count == 1 else 's'}"
