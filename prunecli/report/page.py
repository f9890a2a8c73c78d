"""The report page: its introduction, and a section for each kind of content that the directory has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prunecli import __version__
from prunecli.report.checkpoints import decisions_section, history_section, sizes_section
from prunecli.report.collect import ReportData
from prunecli.report.facts import best, findings
from prunecli.report.measurements import (
    experts_section,
    heads_section,
    languages_section,
    latency_section,
    similarity_section,
    texts_section,
    training_section,
)
from prunecli.report.quality import quality_section
from prunecli.report.render import Block, Text, render, table
from prunecli.tensors.quantities import counted


def unreadable_section(data: ReportData) -> Iterator[Block]:
    """Yield a table of damaged files and checkpoints."""
    if data.unreadable:
        rows = [{"file": one.name, "what is wrong": one.reason} for one in data.unreadable]
        yield table("Left out of this page", rows, text_columns=2)


SECTIONS: Mapping[str, Callable[[ReportData], Iterator[Block]]] = {
    "Unreadable files": unreadable_section,
    "Quality, size and speed": quality_section,
    "Checkpoints": sizes_section,
    "Pruning history": history_section,
    "By what was chosen": decisions_section,
    "Speed and memory": latency_section,
    "Experts": experts_section,
    "Attention heads": heads_section,
    "Languages": languages_section,
    "Texts": texts_section,
    "Similarity of components": similarity_section,
    "Training": training_section,
}
"""Heading -> function that yields the content of the section, in the order of the page."""


def report_page(data: ReportData) -> str:
    """Return the whole page as HTML; equal data makes equal text."""
    sections = [(title, blocks) for title, section in SECTIONS.items() if (blocks := list(section(data)))]
    return render(f"{data.title}: pruning report", sections, list(_introduction(data)))


def _introduction(data: ReportData) -> Iterator[Block]:
    """Yield the contents, the best models with their differences, then the models with bad outputs."""
    contents = (
        f"{counted(len(data.checkpoints), 'checkpoint')} and {counted(len(data.documents), 'result file')}"
    )
    yield Text(f"{contents}; made by prunecli {__version__}.", "soft")
    for compared, found in findings(data):
        if lines := [f"{one.name}: {one.text}" for one in best(found)]:
            yield Text(style="headline", items=lines)
            yield Text(f"Compared {compared}.", "soft")
        if bad := [one.bad for one in found if one.bad]:
            yield Text(style="bad", items=bad)
