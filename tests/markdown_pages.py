"""What a page of Markdown holds, as GitHub shows it."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from urllib.parse import unquote

from markdown_it import MarkdownIt
from markdown_it.token import Token

GITHUB = MarkdownIt("commonmark").enable("table")


@dataclass(frozen=True)
class Page:
    """The parts of a page of Markdown.

    Attributes:
        links: targets of links and images.
        anchors: what a link to a heading of this page may end with, after the `#`.
        code: spans of code.
        typed: lines that a reader is to type, without the prompt.
    """

    links: tuple[str, ...]
    anchors: frozenset[str]
    code: tuple[str, ...]
    typed: tuple[str, ...]


def parse(text: str) -> Page:
    tokens = GITHUB.parse(text)
    inline = [child for token in tokens for child in token.children or ()]
    attributes = {"link_open": "href", "image": "src"}
    return Page(
        links=tuple(unquote(str(t.attrs[attributes[t.type]])) for t in inline if t.type in attributes),
        anchors=frozenset(anchors(heading_texts(tokens))),
        code=tuple(t.content for t in inline if t.type == "code_inline"),
        typed=tuple(
            line.removeprefix("$ ")
            for t in tokens
            if t.type in ("fence", "code_block")
            for line in t.content.replace("\\\n", " ").splitlines()
            if line.startswith(("$ ", "python "))
        ),
    )


def heading_texts(tokens: list[Token]) -> Iterator[str]:
    for start, inner in pairwise(tokens):
        if start.type == "heading_open":
            yield "".join(child.content for child in inner.children or ())


def anchors(headings: Iterable[str]) -> Iterator[str]:
    """GitHub's rule: small letters, no punctuation, hyphens for spaces, a number for what came before."""
    seen = {}
    for heading in headings:
        name = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        number = seen[name] = seen.get(name, -1) + 1
        yield f"{name}-{number}" if number else name
