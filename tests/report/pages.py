"""A strict reader of pages: what it accepts is well-formed, accessible and self-contained."""

import json
import re
from html.parser import HTMLParser
from itertools import pairwise

from tests.pictures import drawn

EMPTY = {"meta", "link", "br"}
TAGS = (
    "html head body title style header main nav section h1 h2 h3 h4 p ul ol li a div figure figcaption "
    "table caption thead tbody tr th td script code span"
)
ALLOWED = set(TAGS.split())


class Page(HTMLParser):
    """A page read whole.

    Attributes:
        text: all of it that a reader sees, but for the charts.
        charts: caption -> specification.
        scripts: those that run.
        nodes: titles of the nodes of the tree of checkpoints.
        headings: (level, text) in order.
        tags: name -> how often.
        figures: captions of tables and figures.
    """

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.text, self.headings, self.tags, self.figures = "", [], {}, []
        self.charts = {}
        self.scripts = []
        self.nodes = []
        self._open = []
        self._collected = ""
        self._links, self._ids = [], []
        assert source.startswith("<!DOCTYPE html>\n<html ")
        self.feed(source)
        self.close()
        assert not self._open, f"never closed: {self._open}"
        assert set(self.tags) <= ALLOWED | EMPTY, set(self.tags) - ALLOWED - EMPTY
        assert len(set(self._ids)) == len(self._ids)
        assert {link[1:] for link in self._links} <= set(self._ids)
        levels = [level for level, _ in self.headings]
        assert levels[0] == 1
        assert levels.count(1) == 1
        assert all(below - above <= 1 for above, below in pairwise(levels))

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.tags[tag] = self.tags.get(tag, 0) + 1
        assert not [name for name in found if name.startswith("on") or name in ("src", "style", "srcset")], (
            tag
        )
        if "href" in found:
            if tag == "a":
                self._links.append(found["href"])
                assert found["href"].startswith("#")
            else:
                assert found["href"] == "data:,"
        if "id" in found:
            self._ids.append(found["id"])
        if found.get("class", "").startswith("node"):
            self.nodes.append(found["title"])
        if found.get("class") == "chart":
            assert found["role"] == "img"
            assert found["aria-label"] == self.figures[-1]
        if self._open and self._open[-1][0] == "table":
            self._open[-1][1].setdefault("first child", tag)
            assert self._open[-1][1]["first child"] == "caption"
        if tag not in EMPTY:
            self._open.append((tag, found))
            self._collected = ""

    def handle_endtag(self, tag):
        assert self._open, f"closed but not open: {tag}"
        assert self._open.pop()[0] == tag
        if re.fullmatch("h[1-4]", tag):
            self.headings.append((int(tag[1]), self._collected))
        if tag in ("caption", "figcaption"):
            self.figures.append(self._collected)

    def handle_data(self, data):
        if any(tag == "script" for tag, _ in self._open):
            if self._open[-1][1]:
                self.charts[self.figures[-1]] = json.loads(data)
            else:
                self.scripts.append(data)
            return
        if any(tag == "style" for tag, _ in self._open):
            assert not re.search(r"url\(|@import|https?:|@font-face", data)
            return
        self.text += data + "\n"
        self._collected += data

    def rows(self, caption: str, mark: str) -> list[dict]:
        """Return the data of all layers of the chart with this caption that have this mark."""
        return drawn(self.charts[caption], mark)

    def sections(self) -> list[str]:
        """Headings of the sections."""
        return [text for level, text in self.headings if level == 2]
