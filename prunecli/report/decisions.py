"""The section of decisions: by which values each step chose what stays, and where each place was cut."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from prunecli.analysis.decisions import CUT_COLUMNS, number_text, place_name, place_rows, summary
from prunecli.model.decision import Decision
from prunecli.report.collect import CheckpointEntry, ReportData
from prunecli.report.grids import heat_map, scale_key, scale_of
from prunecli.report.markup import Html, element, join, table

MAPPED = ("expert", "head", "layer")
"""Parts of which there are few enough for a map."""


def decisions_section(data: ReportData) -> Html | None:
    """Each step that chose by values, of each checkpoint that was the first with it; None where there is none."""
    parts: list[Html] = []
    seen: set[tuple[str, int, str]] = set()
    for entry in data.checkpoints:
        for step, decision in entry.decisions.items():
            origin = entry.history[step].get("source", {}).get("fingerprint", "")
            key = origin, step, repr(sorted(entry.history[step].items()))
            if key in seen or decision.metric is None:  # what later steps carry along is told once
                continue
            seen.add(key)
            parts += _decision(entry, step, decision)
    if not parts:
        return None
    note = "A stroke marks what went. Near 0, the gap over the spread says that another text might choose otherwise."
    return join([element("p", note), *parts])


def _decision(entry: CheckpointEntry, step: int, decision: Decision) -> Iterator[Html]:
    command = str(entry.history[step].get("command", "?"))
    yield element("h3", f"{entry.name}: step {step + 1}, {command}")
    yield element("p", " ".join(summary(decision)))
    if decision.part in MAPPED:
        yield _map(decision)
    yield table("Where each place was cut", place_rows(decision), CUT_COLUMNS)


def _map(decision: Decision) -> Html:
    """Places by ids: the values, those that went marked. The groups of a router stand in one row."""
    rows: dict[str, tuple[list[float | None], list[bool]]] = {}
    most = 1 + max((int(place.ids[-1]) for place in decision.places if len(place.ids)), default=0)
    for place in decision.places:
        name = place_name(decision, place).partition(", group ")[0]
        values, gone = rows.setdefault(name, ([None] * most, [False] * most))
        for at, number in enumerate(place.ids.tolist()):
            value = np.nan if place.values is None else float(place.values[at])
            values[number] = value if np.isfinite(value) else None
            gone[number] = not place.kept[at]
    grid = [values for values, _ in rows.values()]
    scale = scale_of([grid])
    drawn = heat_map(
        f"{decision.part.capitalize()}s by {decision.metric}",
        grid,
        list(rows),
        [str(number) for number in range(most)],
        scale,
        told=("", f"{decision.part} "),
        gone=[gone for _, gone in rows.values()],
    )
    return join([drawn, scale_key(scale, number_text(scale.low), number_text(scale.high))])
