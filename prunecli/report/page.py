"""The report page: its introduction, and a section for each kind of content that the directory has."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pandas as pd

from prunecli import __version__
from prunecli.analysis.explanation import cuts, place_name, summary
from prunecli.analysis.removed import Removed, Unit, removed
from prunecli.model.decision import Decision
from prunecli.model.inventory import PARTS
from prunecli.model.parts import KIND_NAMES, describe_parts
from prunecli.model.structure import statistics_files
from prunecli.report.charts import (
    Bar,
    Picture,
    Point,
    bars,
    colour_range,
    heat_map,
    kept_of,
    kept_units,
)
from prunecli.report.collect import (
    MOST_IN_LAYER,
    CheckpointEntry,
    ReportData,
    Row,
    best,
    findings,
    rows_of,
)
from prunecli.report.history import command_lines, family_tree, original
from prunecli.report.pictures import pictures_of, reduction_curves
from prunecli.report.render import Block, Heading, Text, Tree, render
from prunecli.results.document import Cells, Document, Shown, maybe, millions
from prunecli.results.evaluation import LOWER_IS_BETTER, Evaluation, Score
from prunecli.results.gates import GateStatistics
from prunecli.results.languages import Languages, Texts
from prunecli.results.latency import Latency
from prunecli.results.rewriting import Shrunk, Training
from prunecli.results.similarity import HeadComparison, Similarity
from prunecli.results.unit_scores import Scores
from prunecli.tensors.quantities import bytes_text, counted

Content = Iterator[Block]
"""Content of a section."""
MOST_PAIRS, MOST_CHECKPOINTS = 40, 8
"""Scores by pair are listed for at most so many."""


def quality_section(data: ReportData) -> Content:
    """Yield charts and tables of each evaluation.json."""
    for name, stored in data.of(Evaluation):
        evaluation, _ = stored.tested
        rows = rows_of(evaluation, data)
        unit, lost = _lost(rows)
        yield Heading(name)
        drawn = [item for item in evaluation.shown_scores.items() if not item[1].form.endswith("d")]
        if charts := [chart for item in drawn[:1] for chart in _charts(*item, rows, unit, lost)]:
            yield charts
        main, *others = evaluation.shown(MOST_PAIRS if len(rows) <= MOST_CHECKPOINTS else 0)
        sized = []
        for index, (shown, row) in enumerate(zip(main.rows, rows, strict=True)):
            speed: Cells = {}
            if row.timed is not None:
                timing = row.timed.timings[0]
                name, spread = timing.rate
                speed = {
                    name.replace(" per second", "/s"): spread.text(1),
                    "speed-up": timing.speedup.text(2),
                    "remark": "noisy" if timing.is_noisy else None,
                }
            sized.append(
                {
                    "checkpoint": row.result.checkpoint,
                    f"{unit} removed": f"{lost[index].fraction:.1%}" if index in lost else None,
                    "parameters": None,  # its column; the value is below
                    "size": maybe(bytes_text, row.size[1]),
                    **dict(shown, parameters=maybe(millions, row.size[0])),
                    **speed,
                }
            )
        yield replace(main, rows=sized)
        yield from others
        if evaluation.examples:
            labels = dict.fromkeys(label for example in evaluation.examples for label in example.outputs)
            examples = [
                {"input": one.source, "of": one.pair or one.text, "reference": one.reference}
                | {label: one.outputs.get(label) for label in labels}
                for one in evaluation.examples
            ]
            yield Shown("Examples of outputs", examples, text_columns=3 + len(labels))


def _lost(rows: Sequence[Row]) -> tuple[Unit, dict[int, Removed]]:
    """Return what was removed from each row's checkpoint, by index of the row.

    Checkpoints that cannot be opened are left out, except originals of those that can.
    """
    opened = {index: row.entry for index, row in enumerate(rows) if row.entry is not None}
    if not opened:
        return "parameters", {}
    whole = None if 0 in opened else rows[0].size[0]
    unit, losses = removed([entry.checkpoint for entry in opened.values()], whole)
    if unit == "parameters" and rows[0].size[0] is None:  # fractions are relative to the first checkpoint
        return unit, {}
    lost = dict(zip(opened, losses, strict=True))
    for index, row in enumerate(rows):
        if index not in opened and row.fingerprint:
            derived = [
                i for i, entry in opened.items() if entry.history and original(entry)[1] == row.fingerprint
            ]
            if lines := dict.fromkeys(line for i in derived for line in lost[i].lines):
                lost[index] = Removed(0.0, tuple(lines), is_original=True)
    return unit, lost


def _charts(
    key: str, score: Score, rows: Sequence[Row], unit: Unit, lost: dict[int, Removed]
) -> Iterator[Picture]:
    name = score.title
    y_title = f"{name} (lower is better)" if key in LOWER_IS_BETTER else name
    scored = {index: row for index, row in enumerate(rows) if key in row.scores}
    timed = {index: row.timed.timings[0].rate for index, row in scored.items() if row.timed}
    by_share = {index: 100 * lost[index].fraction for index in scored if index in lost}
    by_size = {i: row.size[0] / 1e6 for i, row in scored.items() if row.size[0] is not None}
    by_speed = {index: spread.median for index, (_, spread) in timed.items()}
    axes = [
        (f"{name} against the {unit} removed", by_share, f"% of {unit} removed"),
        (f"{name} against parameters", by_size, "million parameters"),
        (f"{name} against speed", by_speed, ", ".join(sorted({rate for rate, _ in timed.values()}))),
    ]
    for caption, values, x_title in axes[unit == "parameters" :]:
        if len(values) > 1:
            models = [
                (Point(x, rows[i].scores[key], rows[i].result.checkpoint), lost.get(i))
                for i, x in values.items()
            ]
            joined = values is not by_speed
            yield reduction_curves(caption, models, (x_title, y_title), least=2, is_joined=joined)


MAPPED = ("expert", "head", "layer")
"""Kinds of units that are few enough for a map."""


def sizes_section(data: ReportData) -> Content:
    """Yield tables and a chart of the checkpoints' sizes; checkpoints outside the directory come first."""
    entries = [*data.elsewhere, *data.checkpoints]
    if not entries:
        return
    yield Shown(
        "The checkpoints, counted from their headers", [_overview(entry) for entry in entries], text_columns=4
    )
    parts = [part for part in PARTS if any(part in entry.inventory.parts for entry in entries)]
    drawn = [
        Bar(entry.name, amount.bytes, bytes_text(amount.bytes), part)
        for entry in entries
        for part, amount in entry.inventory.parts.items()
    ]
    yield [bars("Bytes of weights by part", drawn, "bytes")]
    rows = [
        {"checkpoint": entry.name}
        | {part: maybe("{0.parameters:,}", entry.inventory.parts.get(part)) for part in parts}
        | {"total": f"{entry.inventory.total.parameters:,}"}
        for entry in entries
    ]
    yield Shown("Parameters by part", rows)


def _overview(entry: CheckpointEntry) -> Cells:
    inventory, structure = entry.inventory, entry.checkpoint.structure
    vocabulary = None if inventory.tables is None else inventory.tables.vocabulary
    counts = [step["vocabulary"] for step in entry.history if isinstance(step.get("vocabulary"), dict)]
    before = counts[0].get("before") if counts else None  # of the original, if the history states it
    tokens = (
        [(vocabulary, before if isinstance(before, int) else vocabulary)] if vocabulary is not None else []
    )
    return {
        "checkpoint": entry.name,
        "family": entry.checkpoint.model_type,
        "FFN": describe_parts(inventory.ffns, structure.widths) or None,
        "attention": describe_parts(inventory.attentions, {}) or None,
        "parameters": millions(inventory.total.parameters),
        "of the original": maybe(
            lambda size: f"{inventory.total.parameters / size[0]:.1%}", structure.original_size
        ),
        "size": bytes_text(inventory.total.bytes),
        "type": ", ".join(inventory.dtypes),
        "layers": kept_of([(len(stack.layers), stack.original_layers) for stack in inventory.stacks]),
        "tokens": kept_of(tokens),
        "experts": kept_of([(layer.num_experts, layer.original_experts) for layer in inventory.layers]),
        "heads": kept_of([(layer.count, layer.original_heads) for layer in inventory.attentions]),
    }


def history_section(data: ReportData) -> Content:
    """Yield the tree of all checkpoints that prunecli made, then the steps of each."""
    derived = [entry for entry in data.checkpoints if entry.history]
    if not derived:
        return
    stock = [entry for entry in (*data.checkpoints, *data.elsewhere) if not entry.history]
    caption = "Checkpoints below the one they were made from. An empty dot: not in this directory."
    yield Tree(caption, family_tree(derived, stock, {entry.name for entry in data.checkpoints}))
    for entry in derived:
        _, fingerprint, name = original(entry)
        shown = fingerprint if len(fingerprint) <= 16 else f"{fingerprint[:15]}…"
        yield Heading(entry.name)
        yield Text(f"From {name}{f' ({shown})' if fingerprint else ''}:", "soft")
        yield Text(style="steps", items=command_lines(entry, data.checkpoints))
        files = dict.fromkeys(
            f"{file.get('file')} (sha256:{str(file.get('sha256'))[:8]}…)"
            for step in entry.history
            for file in statistics_files(step)
        )
        if files:
            yield Text(f"Statistics: {', '.join(files)}.", "soft")


def decisions_section(data: ReportData) -> Content:
    """Yield the values by which each step chose what to keep, at the first checkpoint with that step."""
    seen: set[tuple[str, int, str]] = set()
    for entry in data.checkpoints:
        for step, decision in entry.decisions.items():
            origin = entry.history[step].get("source", {}).get("fingerprint", "")
            key = origin, step, repr(sorted(entry.history[step].items()))
            if key in seen or decision.metric is None:
                continue
            if not seen:
                yield (
                    "A stroke marks what was removed. If the gap over the spread is near 0, another text might lead to "
                    "another choice."
                )
            seen.add(key)
            yield Heading(f"{entry.name}: step {step + 1}, {entry.history[step]['command']}")
            yield " ".join(summary(decision))
            if decision.part in MAPPED and all(place.count <= MOST_IN_LAYER for place in decision.places):
                yield [_decision_map(decision)]
            yield cuts(decision)


def _decision_map(decision: Decision) -> Picture:
    """Draw places by the ids that were up for the choice. The groups of a router share a row."""
    cells = pd.concat(
        pd.DataFrame(
            {
                "place": place_name(decision, place).partition(", group ")[0],
                "id": place.ids,
                "value": np.nan if place.values is None else place.values,
                "kept": place.kept,
            }
        )
        for place in decision.places
    )
    cells = cells.drop_duplicates(["place", "id"], keep="last")
    maps = cells.pivot(index="place", columns="id").reindex(cells["place"].unique())
    return heat_map(
        f"{decision.part.capitalize()}s by {decision.metric}",
        maps["value"],
        colour_range([maps["value"]]),
        titles=("", decision.part),
        dropped=maps["kept"].eq(False),
    )


def results_section(kind: type[Document], data: ReportData) -> Content:
    """Yield a line, the pictures and the tables of each result of a kind."""
    for name, result in data.of(kind):
        rows = [row for row in pictures_of(result) if row]
        if isinstance(result, Scores) and not rows:
            continue  # of other units than heads
        yield Heading(name)
        if result.about:
            yield result.about
        yield from rows
        yield from getattr(result, "shown", ())


def experts_section(data: ReportData) -> Content:
    """Yield the experts that each checkpoint kept, and how often each gates.json ranks an expert first."""
    kept = [
        one for one in data.checkpoints if one.checkpoint.structure.of_kind("expert") and one.inventory.layers
    ]
    if kept:
        yield (
            "Each cell is an expert of the original model: it stands out if it was kept and is faint if it was removed."
        )
    for entry in kept:
        layers = [
            (f"{one.side} {one.layer}", one.experts, one.original_experts) for one in entry.inventory.layers
        ]
        yield Heading(entry.name)
        yield [kept_units(f"Experts kept by {entry.name}", layers, "expert")]
    yield from results_section(GateStatistics, data)


def heads_section(data: ReportData) -> Content:
    """Yield heat maps of each heads.json, correlations of two of them, and the heads that each checkpoint kept."""
    yield from results_section(Scores, data)
    yield from results_section(HeadComparison, data)
    kept = [
        one
        for one in data.checkpoints
        if one.checkpoint.structure.of_kind("head") and one.inventory.attentions
    ]
    if kept:
        yield Heading("Heads that are left")
        yield "Layers by heads of the original model; kept heads stand out, removed ones are faint."
    for entry in kept:
        drawn = []
        for kind in dict.fromkeys(layer.kind for layer in entry.inventory.attentions):
            own = [layer for layer in entry.inventory.attentions if layer.kind == kind]
            layers = [(str(layer.layer), layer.heads, layer.original_heads) for layer in own]
            if any(layer.original_heads for layer in own):
                drawn.append(kept_units(KIND_NAMES[kind], layers, "head"))
        yield Heading(entry.name, level=4)
        yield drawn


def training_section(data: ReportData) -> Content:
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


def unreadable_section(data: ReportData) -> Content:
    """Yield a table of damaged files and checkpoints."""
    if data.unreadable:
        rows = [{"file": name, "what is wrong": reason} for name, reason in data.unreadable.items()]
        yield Shown("Left out of this page", rows, text_columns=2)


SECTIONS: Mapping[str, Callable[[ReportData], Content]] = {
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
    """Return the whole page as HTML; equal data makes equal text.

    The introduction has the contents, the best models with their differences, then the models with bad outputs.
    """
    contents = (
        f"{counted(len(data.checkpoints), 'checkpoint')} and {counted(len(data.documents), 'result file')}"
    )
    introduction: list[Block] = [Text(f"{contents}; made by prunecli {__version__}.", "soft")]
    for compared, found in findings(data):
        if lines := [f"{one.name}: {one.text}" for one in best(found)]:
            introduction += [Text(style="headline", items=lines), Text(f"Compared {compared}.", "soft")]
        if bad := [one.bad for one in found if one.bad]:
            introduction.append(Text(style="bad", items=bad))
    sections = [(title, blocks) for title, section in SECTIONS.items() if (blocks := list(section(data)))]
    return render(f"{data.title}: pruning report", sections, introduction)
