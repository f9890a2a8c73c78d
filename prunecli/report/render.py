"""Write pictures as PNG, SVG or HTML, and pages of texts, tables and pictures from the template page.html."""

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

from prunecli.report.charts import VEGA_LITE, WIDTH, Picture, missing_packages
from prunecli.report.history import Node
from prunecli.results.document import Json, Shown
from prunecli.tensors.transaction import new_file

NOTHING = "–"
"""Text of a table cell without a value."""


def _asset(name: str) -> str:
    return (files("prunecli.report") / name).read_text(encoding="utf-8")


THEME: Json = json.loads(_asset("theme.json"))
"""Vega-Lite configuration of all charts; colours are those of the page by day. By night a filter of the page inverts
the charts.
"""


@dataclass(frozen=True)
class Heading:
    """A heading inside a section, of level 3 or 4."""

    text: str
    level: int = 3


@dataclass(frozen=True)
class Text:
    """A paragraph with a style, or bullet points if `items` are given; with "steps" numbered command lines."""

    text: str = ""
    style: str = ""
    items: Sequence[str] = ()


@dataclass(frozen=True)
class Tree:
    """A tree of checkpoints as nested lists: the nodes with their depth, parents first."""

    caption: str
    nodes: Sequence[Node]


Block = Heading | Text | Shown | list[Picture] | Tree | str
"""A block of a page: a text is a paragraph; pictures of a list are beside one another, if the page is wide enough."""


def save_pictures(rows: Sequence[list[Picture]], path: Path, title: str) -> None:
    """Write rows of pictures to one PNG, SVG or HTML file, chosen by the suffix of `path`.

    The file appears whole or not at all. An HTML file works offline.
    """
    kind = path.suffix.lower()
    if kind == ".html":
        content = render(title or path.stem, [("", rows)]).encode()
    else:
        import vl_convert

        datasets: Json = {}  # Vega-Lite looks for named data at the top level only
        drawn = []
        for row in filter(None, rows):
            charts = [{**one.specification(WIDTH), "title": one.caption} for one in row]
            for chart in charts:
                datasets |= chart.pop("datasets")
            drawn.append({"hconcat": charts})
        specification = {
            "vconcat": drawn,
            "datasets": datasets,
            "resolve": {"scale": {"color": "independent", "shape": "independent"}},
            "config": {**THEME, "background": "white"},
            "padding": 12,
            **({"title": title} if title else {}),
        }
        if kind == ".svg":
            content = vl_convert.vegalite_to_svg(specification, VEGA_LITE).encode()
        else:
            content = vl_convert.vegalite_to_png(specification, VEGA_LITE, 1.5)
    with new_file(path) as partial:
        partial.write_bytes(content)


@cache
def _script() -> str:
    """Vega-Lite and what draws the charts with it; bundling takes seconds."""
    import vl_convert

    own = _asset("page.js").replace("THEME", json.dumps(THEME))
    bundle = vl_convert.javascript_bundle(own, VEGA_LITE)
    return bundle.replace("</script", r"<\/script")


def render(
    title: str, sections: Sequence[tuple[str, Sequence[Block]]], introduction: Sequence[Block] = ()
) -> str:
    """Return a page. Texts are escaped; equal content makes equal text.

    Args:
        title: heading of the page.
        sections: heading and content of each section.
        introduction: content above the sections.
    """
    missing = missing_packages()
    drawn = [
        picture for _, blocks in sections for block in blocks if isinstance(block, list) for picture in block
    ]
    script = _script() if drawn and not missing else ""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # Nothing is loaded and only this script runs, whatever the names in the files are.
    policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'"
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, finalize=_printable)
    return environment.from_string(_asset("page.html")).render(
        title=title,
        sections=sections,
        introduction=introduction,
        policy=policy,
        script=Markup(script),
        nothing=NOTHING,
        missing=missing if drawn else "",
        kind=lambda content: type(content).__name__,
        specification=lambda picture: _json(picture.specification("container")),
    )


def _json(value: Any) -> Markup:
    """Return JSON for a script element: no text in it can end the element."""
    return Markup(json.dumps(_printable(value), separators=(",", ":")).replace("<", r"\u003c"))


def _printable(value: Any) -> Any:
    """Replace characters that could hide or reorder text, or that UTF-8 cannot hold; also inside lists and dicts."""
    if isinstance(value, dict):
        return {name: _printable(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_printable(one) for one in value]
    if isinstance(value, Markup) or not isinstance(value, str) or value.isprintable():
        return value
    return "".join(mark if mark.isprintable() or mark in "\n\t" else "\ufffd" for mark in value)
