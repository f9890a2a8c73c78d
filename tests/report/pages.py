"""A strict reader of pages: what it accepts is well-formed, accessible and self-contained."""

import json
import re
from itertools import pairwise
from xml.etree import ElementTree

from tests.pictures import drawn

TAGS = (
    "html head meta link body title style header main nav section h1 h2 h3 h4 p ul ol li a div figure figcaption "
    "table caption thead tbody tr th td script code span"
)


class Page:
    """A page read whole.

    Attributes:
        text: all of it that a reader sees, but for the charts.
        charts: caption -> specification.
        scripts: those that run.
        nodes: titles of the nodes of the tree of checkpoints.
        headings: (level, text) in order.
        figures: captions of tables and figures.
    """

    def __init__(self, source: str) -> None:
        assert source.startswith("<!DOCTYPE html>\n<html ")
        self.scripts = re.findall("<script>(.*?)</script>", source, re.DOTALL)
        charts = re.findall('<script type="application/json">(.*?)</script>', source)
        source = re.sub("(<script.*?>).*?</script>", r"\1</script>", source, flags=re.DOTALL)
        page = ElementTree.fromstring(re.sub("<((?:meta|link) .*?)>", r"<\1/>", source))
        elements = list(page.iter())
        assert {one.tag for one in elements} <= set(TAGS.split())
        names = [name for one in elements for name in one.attrib]
        assert not [name for name in names if name.startswith("on") or name in ("src", "style", "srcset")]
        ids = [one.get("id") for one in page.iterfind(".//*[@id]")]
        assert len(set(ids)) == len(ids)
        assert {one.get("href") for one in page.iter("a")} <= {f"#{name}" for name in ids}
        assert [one.get("href") for one in page.iter("link")] == ["data:,"]
        assert not re.search(r"url\(|@import|https?:|@font-face", page.findtext(".//style"))
        assert all(table[0].tag == "caption" for table in page.iter("table"))
        captions = [one.findtext("figcaption") for one in page.iter("figure")]
        self.charts = dict(zip(captions, map(json.loads, charts), strict=True))
        drawn_in = [(one.get("role"), one.get("aria-label")) for one in page.iterfind(".//*[@class='chart']")]
        assert drawn_in == [("img", caption) for caption in captions]
        self.text = "\n".join(page.find("body").itertext())
        self.nodes = [
            one.get("title") for one in page.iter("span") if one.get("class", "").startswith("node")
        ]
        self.headings = [(int(one.tag[1]), one.text) for one in elements if re.fullmatch("h[1-4]", one.tag)]
        self.figures = [one.text for one in elements if one.tag in ("caption", "figcaption")]
        levels = [level for level, _ in self.headings]
        assert levels[0] == 1
        assert levels.count(1) == 1
        assert all(below - above <= 1 for above, below in pairwise(levels))

    def rows(self, caption: str, mark: str) -> list[dict]:
        """Return the data of all layers of the chart with this caption that have this mark."""
        return drawn(self.charts[caption], mark)

    def sections(self) -> list[str]:
        """Headings of the sections."""
        return [text for level, text in self.headings if level == 2]
