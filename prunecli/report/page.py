"""The page: its head, and a section for everything that there is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from prunecli import __version__
from prunecli.report.collect import ReportData
from prunecli.report.comparisons import languages_part, similarity_part, texts_part
from prunecli.report.costs import latency_part, sizes_section, training_section
from prunecli.report.decisions import decisions_section
from prunecli.report.facts import best, findings
from prunecli.report.history import history_section
from prunecli.report.markup import Html, element, join, table
from prunecli.report.parts import experts_section, heads_section
from prunecli.report.quality import quality_section
from prunecli.report.style import style_sheet
from prunecli.results.document import Document
from prunecli.results.languages import Languages, Texts
from prunecli.results.latency import Latency
from prunecli.results.similarity import Similarity
from prunecli.tensors.quantities import counted
from prunecli.tensors.transaction import new_file

T = TypeVar("T", bound=Document)
Section = Callable[[ReportData], Html | None]

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""Nothing is fetched and no script runs, whatever a name in a file says."""


def unreadable_section(data: ReportData) -> Html | None:
    """What is damaged, and how; None where nothing is."""
    if not data.unreadable:
        return None
    columns = {"file": lambda entry: entry.name, "what is wrong": lambda entry: entry.reason}
    return table("Left out of this page", data.unreadable, columns, text_columns=2)


def of_each(kind: type[T], part: Callable[[str, T], Html]) -> Section:
    """A section with a part, of a file's name and content, for each result of this kind; None where there is none."""

    def section(data: ReportData) -> Html | None:
        files = data.of(kind)
        return join([part(name, content) for name, content in files]) if files else None

    return section


SECTIONS: Mapping[str, Section] = {
    "Unreadable files": unreadable_section,
    "Quality, size and speed": quality_section,
    "Checkpoints": sizes_section,
    "Pruning history": history_section,
    "By what was chosen": decisions_section,
    "Speed and memory": of_each(Latency, latency_part),
    "Experts": experts_section,
    "Attention heads": heads_section,
    "Languages": of_each(Languages, languages_part),
    "Texts": of_each(Texts, texts_part),
    "Similarity of components": of_each(Similarity, similarity_part),
    "Training": training_section,
}
"""Heading -> what makes the section, in the order of the page."""


def report_page(data: ReportData) -> str:
    """The whole page; the same data makes the same text."""
    pages = ((title, section(data)) for title, section in SECTIONS.items())
    sections = [(title, content) for title, content in pages if content is not None]
    links = [
        element("li", element("a", title, href=f"#s{index}")) for index, (title, _) in enumerate(sections, 1)
    ]
    said = (
        f"{counted(len(data.checkpoints), 'checkpoint')} and {counted(len(data.documents), 'result file')}; "
        f"made by prunecli {__version__}."
    )
    body = element(
        "body",
        element(
            "header",
            element("h1", f"{data.title}: pruning report"),
            element("p", said, class_="soft"),
            *_headline(data),
            element("nav", element("ul", *links), aria_label="Sections"),
        ),
        element(
            "main",
            *(
                element("section", element("h2", title, id=f"s{index}"), content)
                for index, (title, content) in enumerate(sections, 1)
            ),
        ),
    )
    return f"<!DOCTYPE html>\n{element('html', _head(data.title), body, lang='en')}\n"


def _headline(data: ReportData) -> Iterator[Html]:
    """The best models, what each lacks and costs; then those whose results are bad."""
    for compared, found in findings(data):
        lines = [element("li", element("b", one.text), f" {one.name}") for one in best(found)]
        if lines:
            yield element("ul", *lines, class_="headline")
            yield element("p", f"Compared {compared}.", class_="soft")
        bad = [element("li", one.bad) for one in found if one.bad]
        if bad:
            yield element("ul", *bad, class_="bad")


def _head(title: str) -> Html:
    return element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=POLICY),
        element("meta", name_="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name_="color-scheme", content="light dark"),
        element("link", rel="icon", href="data:,"),
        element("title", f"{title}: pruning report"),
        element("style", Html(style_sheet())),
    )


def write_page(path: Path, page: str) -> None:
    """Write beside `path`, then rename: the file appears whole or not at all.

    Raises:
        OutputError: its directory does not exist, or the file cannot be written.
    """
    with new_file(path) as partial, partial.open("w", encoding="utf-8", newline="\n") as file:
        file.write(page)
