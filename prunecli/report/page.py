"""The report page: its introduction, and a section for each kind of content that the directory has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

from prunecli import __version__
from prunecli.report.checkpoints import (
    decisions_section,
    history_section,
    kept_experts,
    kept_heads,
    quality_section,
    sizes_section,
)
from prunecli.report.collect import ReportData
from prunecli.report.facts import best, findings
from prunecli.report.pictures import pictures_of
from prunecli.report.render import Block, Heading, Pictures, Text, render
from prunecli.results.document import Document, Shown
from prunecli.results.gates import GateStatistics
from prunecli.results.languages import Languages, Texts
from prunecli.results.latency import Latency
from prunecli.results.rewriting import Training
from prunecli.results.shrinking import Shrunk
from prunecli.results.similarity import HeadComparison, Similarity
from prunecli.results.unit_scores import Scores
from prunecli.tensors.quantities import counted


def results_section(kind: type[Document], data: ReportData) -> Iterator[Block]:
    """Yield a line, the pictures and the tables of each result of a kind."""
    for name, result in data.of(kind):
        rows = [row for row in pictures_of(result) if row]
        if isinstance(result, Scores) and not rows:
            continue  # of other units than heads
        yield Heading(name)
        if result.about:
            yield Text(result.about)
        yield from map(Pictures, rows)
        yield from getattr(result, "shown", ())


def experts_section(data: ReportData) -> Iterator[Block]:
    """Yield the experts that each checkpoint kept, and how often each gates.json ranks an expert first."""
    kept = list(kept_experts(data))
    if kept:
        yield Text(
            "Each cell is an expert of the original model: it stands out if it was kept and is faint if it was removed."
        )
        yield from kept
    yield from results_section(GateStatistics, data)


def heads_section(data: ReportData) -> Iterator[Block]:
    """Yield heat maps of each heads.json, correlations of two of them, and the heads that each checkpoint kept."""
    yield from results_section(Scores, data)
    yield from results_section(HeadComparison, data)
    yield from kept_heads(data)


def training_section(data: ReportData) -> Iterator[Block]:
    """Yield a table of all trainings and curves of each OUTPUT.finetune.json."""
    rows = []
    for name, training in data.of(Training):
        best = (training.best or {}).get("step")
        last = [vars(one) for one in training.validation[-1:]]
        rows.append(
            {**vars(training), **dict(*last), "file": name, "best": best if isinstance(best, int) else None}
        )
    columns = {
        "file": "{file}",
        "result": "{output}",
        "updates": "{steps:,}",
        "tokens": "{tokens:,}",
        "tokens/s": "{tokens_per_second:,.0f}",
        "best at": "{best:,}",
        "last loss": "{loss:.4f}",
        "last chrF++": "{chrf:.2f}",
    }
    if rows:
        yield Shown.of("Trainings; losses and chrF++ were measured on validation text", rows, columns, 2)
    yield from results_section(Training, data)


def unreadable_section(data: ReportData) -> Iterator[Block]:
    """Yield a table of damaged files and checkpoints."""
    if data.unreadable:
        rows = [{"file": name, "what is wrong": reason} for name, reason in data.unreadable.items()]
        yield Shown("Left out of this page", rows, text_columns=2)


SECTIONS: Mapping[str, Callable[[ReportData], Iterator[Block]]] = {
    "Unreadable files": unreadable_section,
    "Quality, size and speed": quality_section,
    "Checkpoints": sizes_section,
    "Pruning history": history_section,
    "By what was chosen": decisions_section,
    "Speed and memory": partial(results_section, Latency),
    "Experts": experts_section,
    "Attention heads": heads_section,
    "Languages": partial(results_section, Languages),
    "Texts": partial(results_section, Texts),
    "Similarity of components": partial(results_section, Similarity),
    "Shrinking to a target": partial(results_section, Shrunk),
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
