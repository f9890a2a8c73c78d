"""The page's sections on checkpoints: sizes, history, decisions, and the experts and heads that are left."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from prunecli.analysis.decisions import CUT_COLUMNS, place_name, place_rows, summary
from prunecli.model.attention import KIND_NAMES
from prunecli.model.decision import Decision
from prunecli.model.inventory import PARTS
from prunecli.model.parts import describe_parts
from prunecli.report.charts import Bar, Picture, bars, colour_range, heat_map, kept_units
from prunecli.report.collect import CheckpointEntry, ReportData
from prunecli.report.history import command_lines, family_tree, original, statistics
from prunecli.report.quality import millions
from prunecli.report.render import Block, Heading, Pictures, Steps, Text, Tree, maybe, table
from prunecli.tensors.quantities import bytes_text

MAPPED = ("expert", "head", "layer")
"""Kinds of units that are few enough for a map."""


def sizes_section(data: ReportData) -> Iterator[Block]:
    """Yield tables and a chart of the checkpoints' sizes; checkpoints outside the directory come first."""
    entries = [*data.elsewhere, *data.checkpoints]
    if not entries:
        return
    yield table(
        "The checkpoints, counted from their headers", [_overview(entry) for entry in entries], text_columns=4
    )
    parts = [part for part in PARTS if any(part in entry.inventory.parts for entry in entries)]
    amounts = [(entry, part, entry.inventory.parts.get(part)) for entry in entries for part in parts]
    rows = [
        Bar(e.name, amount.bytes, bytes_text(amount.bytes), part) for e, part, amount in amounts if amount
    ]
    yield Pictures([bars("Bytes of weights by part", rows, "bytes")])
    for caption, field, form in (("Parameters", "parameters", "{:,}".format), ("Bytes", "bytes", bytes_text)):
        cells = [
            {"checkpoint": entry.name}
            | {part: maybe(form, getattr(entry.inventory.parts.get(part), field, None)) for part in parts}
            | {"total": form(getattr(entry.inventory.total, field))}
            for entry in entries
        ]
        yield table(f"{caption} by part", cells)


def _overview(entry: CheckpointEntry) -> dict[str, str | None]:
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
        "layers": _kept([(len(stack.layers), stack.original_layers) for stack in inventory.stacks]),
        "tokens": _kept(tokens),
        "experts": _kept([(layer.num_experts, layer.original_experts) for layer in inventory.layers]),
        "heads": _kept([(layer.num_heads, layer.original_heads) for layer in inventory.attentions]),
    }


def _kept(counts: Sequence[tuple[int, int]]) -> str | None:
    """Format the sum of (kept, original) over layers: '288 of 1,536', or '1,536' if nothing was removed."""
    if not counts:
        return None
    kept, whole = map(sum, zip(*counts, strict=True))
    return f"{kept:,}" if kept == whole else f"{kept:,} of {whole:,}"


def history_section(data: ReportData) -> Iterator[Block]:
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
        yield Steps(command_lines(entry, data.checkpoints))
        if files := dict.fromkeys(text for step in entry.history for text in statistics(step)):
            yield Text(f"Statistics: {', '.join(files)}.", "soft")


def decisions_section(data: ReportData) -> Iterator[Block]:
    """Yield the values by which each step chose what to keep, at the first checkpoint with that step."""
    seen: set[tuple[str, int, str]] = set()
    for entry in data.checkpoints:
        for step, decision in entry.decisions.items():
            origin = entry.history[step].get("source", {}).get("fingerprint", "")
            key = origin, step, repr(sorted(entry.history[step].items()))
            if key in seen or decision.metric is None:
                continue
            if not seen:
                yield Text(
                    "A stroke marks what was removed. If the gap over the spread is near 0, another text might lead to "
                    "another choice."
                )
            seen.add(key)
            yield Heading(f"{entry.name}: step {step + 1}, {entry.history[step].get('command', '?')}")
            yield Text(" ".join(summary(decision)))
            if decision.part in MAPPED:
                yield Pictures([_decision_map(decision)])
            cuts = [{name: cell(row) for name, cell in CUT_COLUMNS.items()} for row in place_rows(decision)]
            yield table("Where each place was cut", cuts)


def _decision_map(decision: Decision) -> Picture:
    """Draw places by ids. The groups of a router share a row."""
    rows: dict[str, tuple[list[float | None], list[bool]]] = {}
    count = 1 + max((int(place.ids[-1]) for place in decision.places if len(place.ids)), default=0)
    for place in decision.places:
        name = place_name(decision, place).partition(", group ")[0]
        values, dropped = rows.setdefault(name, ([None] * count, [False] * count))
        for at, number in enumerate(place.ids.tolist()):
            value = np.nan if place.values is None else float(place.values[at])
            values[number] = value if np.isfinite(value) else None
            dropped[number] = not place.kept[at]
    grid = [values for values, _ in rows.values()]
    return heat_map(
        f"{decision.part.capitalize()}s by {decision.metric}",
        grid,
        list(rows),
        [str(number) for number in range(count)],
        colour_range([grid]),
        titles=("", decision.part),
        dropped=[dropped for _, dropped in rows.values()],
    )


def kept_experts(data: ReportData) -> Iterator[Block]:
    """Yield a map of the kept experts for each checkpoint with fewer experts than its original."""
    for entry in data.checkpoints:
        if entry.checkpoint.structure.of_kind("expert") and entry.inventory.layers:
            layers = [
                (f"{one.side} {one.layer}", one.experts, one.original_experts)
                for one in entry.inventory.layers
            ]
            count = _kept([(len(kept), original) for _, kept, original in layers])
            yield Heading(entry.name)
            yield Pictures([kept_units(f"Experts kept by {entry.name}: {count}", layers, "expert")])


def kept_heads(data: ReportData) -> Iterator[Block]:
    """Yield a map of the kept heads by kind of attention for each checkpoint with fewer heads than its original."""
    entries = [
        one
        for one in data.checkpoints
        if one.checkpoint.structure.of_kind("head") and one.inventory.attentions
    ]
    if entries:
        yield Heading("Heads that are left")
        yield Text("Layers by heads of the original model; kept heads stand out, removed ones are faint.")
    for entry in entries:
        drawn = []
        for kind in dict.fromkeys(layer.kind for layer in entry.inventory.attentions):
            own = [layer for layer in entry.inventory.attentions if layer.kind == kind]
            layers = [(str(layer.layer), layer.heads, layer.original_heads) for layer in own]
            if any(layer.original_heads for layer in own):
                count = _kept([(layer.num_heads, layer.original_heads) for layer in own])
                drawn.append(kept_units(f"{KIND_NAMES[kind]}: {count} heads", layers, "head"))
        yield Heading(entry.name, level=4)
        yield Pictures(drawn)
