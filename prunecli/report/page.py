"""The report page: its introduction, and a section for each kind of content that the directory has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from prunecli import __version__
from prunecli.model.axes import module_of
from prunecli.report.charts import Picture, Point, curves, heat_map
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
from prunecli.report.pictures import (
    component_maps,
    head_comparison,
    head_maps,
    language_pictures,
    shrink_picture,
    speed_pictures,
    text_pictures,
)
from prunecli.report.render import Block, Heading, Pictures, Text, render
from prunecli.results.document import Shown, maybe
from prunecli.results.gates import GateStatistics
from prunecli.results.languages import Languages, Texts
from prunecli.results.latency import Latency
from prunecli.results.rewriting import LoggedStep, Training
from prunecli.results.shrinking import Shrunk
from prunecli.results.similarity import HeadComparison, Similarity
from prunecli.results.unit_scores import Scores
from prunecli.tensors.quantities import counted

MOST_POINTS = 300
"""A longer training log is thinned to at most so many points."""
METHODS = {
    "gradient": "importance by gradient (1905.10650, eq. 2)",
    "ablation": "what the score loses without the head",
    "all-but-one": "the score with this head alone in its layer",
}


def latency_section(data: ReportData) -> Iterator[Block]:
    """Yield charts and tables of each latency.json."""
    for name, latency in data.of(Latency):
        runs = f"{counted(latency.runs, 'run')} after {latency.warm_up} of warm-up"
        threads = "" if latency.threads is None else f", {counted(latency.threads, 'CPU thread')}"
        yield Heading(name)
        yield Text(f"Median ± deviation of {runs}; {latency.device}{threads}.")
        yield Pictures(speed_pictures(latency))
        yield from latency.shown


def experts_section(data: ReportData) -> Iterator[Block]:
    """Yield the experts that each checkpoint kept, and how often each gates.json ranks an expert first."""
    kept = list(kept_experts(data))
    if kept:
        yield Text(
            "Each cell is an expert of the original model: it stands out if it was kept and is faint if it was removed."
        )
        yield from kept
    for name, statistics in data.of(GateStatistics):
        sums = statistics.combined(statistics.entries)
        grid = [
            [float(count) / float(total) if total else None for count in row]
            for row, total in zip(sums.top1, sums.tokens, strict=True)
        ]
        is_text = statistics.mode == "text"
        entry, how = ("text", "") if is_text else ("pair", f", collected with {statistics.mode} decoding")
        caption = f"Share of a layer's tokens that rank an expert first, over all {entry}s"
        experts = [str(number) for number in range(statistics.num_experts)]
        high = max((value for row in grid for value in row if value is not None), default=0.0)
        yield Heading(name)
        yield Text(f"{counted(len(statistics.entries), entry)}{how}.")
        yield Pictures(
            [heat_map(caption, grid, statistics.layers, experts, (0.0, high), titles=("", "expert"))]
        )


def heads_section(data: ReportData) -> Iterator[Block]:
    """Yield heat maps of each heads.json, correlations of two of them, and the heads that each checkpoint kept."""
    for name, scores in data.of(Scores):
        if scores.kind != "head":
            continue
        drawn = scores.means() if scores.method == "all-but-one" else scores.importance()
        values = {
            module_of(axis): dict(zip(scores.ids[axis], own.tolist(), strict=True))
            for axis, own in drawn.items()
        }
        per = " per token" if scores.per == "token" else ""
        about = f"{METHODS[scores.method]}{per}; {scores.task}, {counted(scores.examples, 'example')}"
        if scores.metric is not None and scores.base is not None:
            about += f"; {scores.metric}, {scores.base:.4g} with all heads"
        yield Heading(name)
        yield Text(f"{about[0].upper()}{about[1:]}.")
        yield Pictures(head_maps(scores.model_type, values))
    for name, comparison in data.of(HeadComparison):
        yield Heading(name)
        if comparison.heads:
            yield Pictures([head_comparison(comparison)])
        yield from comparison.shown
    yield from kept_heads(data)


def languages_section(data: ReportData) -> Iterator[Block]:
    """Yield trees, matrices and counts of each languages.json."""
    for name, languages in data.of(Languages):
        yield Heading(name)
        yield Text(
            f"{counted(len(languages.pairs), 'pair')}; {languages.ratio:.0%} of the experts removed by "
            f"{languages.metric}, {languages.strategy}; clusters join by {languages.clustering.linkage} linkage."
        )
        yield from (Pictures(row) for row in language_pictures(languages) if row)
        yield from languages.shown


def texts_section(data: ReportData) -> Iterator[Block]:
    """Yield the tree, the matrix and the experts by layer of each texts.json."""
    for name, texts in data.of(Texts):
        yield Heading(name)
        yield Text(
            f"{counted(len(texts.texts), 'text')}; {texts.ratio:.0%} of the experts removed by {texts.metric}."
        )
        yield from map(Pictures, text_pictures(texts))
        yield from texts.shown


def similarity_section(data: ReportData) -> Iterator[Block]:
    """Yield maps and means of each similarity.json."""
    for name, similarity in data.of(Similarity):
        texts = [str(text.get("name")) for text in similarity.text]
        named = (
            ", ".join(texts[:4]) + ("…" if len(texts) > 4 else "")
            if texts
            else "text that the file does not name"
        )
        benchmarks = f" Benchmarks: {', '.join(similarity.benchmarks)}." if similarity.benchmarks else ""
        yield Heading(name)
        yield Text(f"{' and '.join(similarity.checkpoints[:2])} on {named}.{benchmarks}")
        yield from similarity.shown
        for row in component_maps(similarity):
            yield Pictures(row)


def training_section(data: ReportData) -> Iterator[Block]:
    """Yield a table of all trainings and curves of each OUTPUT.finetune.json."""
    rows = []
    for name, training in data.of(Training):
        last = training.validation[-1] if training.validation else None
        best = (training.best or {}).get("step")
        rows.append(
            {
                "file": name,
                "result": training.output,
                "updates": f"{training.steps:,}",
                "tokens": f"{training.tokens:,}",
                "tokens/s": f"{training.tokens_per_second:,.0f}",
                "best at": f"{best:,}" if isinstance(best, int) else None,
                "last loss": maybe("{:.4f}", last and last.loss),
                "last chrF++": maybe("{:.2f}", last and last.chrf),
            }
        )
    if rows:
        yield Shown("Trainings; losses and chrF++ were measured on validation text", rows, text_columns=2)
    for name, training in data.of(Training):
        yield Heading(name)
        yield Pictures(list(_training_curves(training)))


def _training_curves(training: Training) -> Iterator[Picture]:
    losses = [*_losses(training.training, "training"), *_losses(training.validation, "validation")]
    if losses:
        names = {"training", "validation"}
        yield curves(f"Loss of {training.output}", losses, "update", "loss", joined=names)
    scores = [
        Point(step.step, step.chrf, "validation", "chrF++")
        for step in training.validation
        if step.chrf is not None
    ]
    if scores:
        yield curves(f"chrF++ of {training.output}", scores, "update", "chrF++", joined={"chrF++"})


def _losses(steps: Sequence[LoggedStep], name: str) -> list[Point]:
    every = max(1, -(-len(steps) // MOST_POINTS))
    return [Point(step.step, step.loss, name, name) for step in steps[::every]]


def shrink_section(data: ReportData) -> Iterator[Block]:
    """Yield the closing table and a chart of cost by size for each OUTPUT.shrink.json."""
    for name, shrunk in data.of(Shrunk):
        yield Heading(name)
        yield from shrunk.shown
        yield Pictures([shrink_picture(f"What was tried for {shrunk.output}", shrunk)])


def unreadable_section(data: ReportData) -> Iterator[Block]:
    """Yield a table of damaged files and checkpoints."""
    if data.unreadable:
        rows = [{"file": one.name, "what is wrong": one.reason} for one in data.unreadable]
        yield Shown("Left out of this page", rows, text_columns=2)


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
    "Shrinking to a target": shrink_section,
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
