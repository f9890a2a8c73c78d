"""A decision as lines and tables: the cut on each axis, and the units on either side."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prunecli.commands import console

if TYPE_CHECKING:
    from prunecli.model.decision import Decision

EITHER_SIDE = 4
"""Number of units on each side of a cut that --explain shows; all units of an axis with no more than twice that."""


def show_decision(decision: Decision | None) -> None:
    """Print the cut on each axis, then the units near it."""
    if decision is None:
        console.out("Nothing was chosen by a value, or among parts: the options say it all.")
        return
    show_cuts(decision)
    if decision.metric is not None:
        show_components(decision)


def show_cuts(decision: Decision) -> None:
    """Print the metric and the text, and a row for each axis."""
    from prunecli.analysis.decisions import CUT_COLUMNS, place_rows, summary

    for line in summary(decision):
        console.out(console.plain(line))
    if decision.metric is not None:
        rows = [[cell(row) or "-" for cell in CUT_COLUMNS.values()] for row in place_rows(decision)]
        console.show(console.table("Where each place was cut", tuple(CUT_COLUMNS), rows))


def show_components(decision: Decision) -> None:
    """Print the units on either side of each cut, highest first; all units of small axes."""
    from prunecli.analysis.decisions import nearest, number_text, place_name

    rows, is_cut = [], False
    for place in decision.places:
        ranks, margins = place.ranks, place.margins
        if place.values is None or ranks is None:
            continue
        chosen = [*range(place.count)]
        if len(chosen) > 2 * EITHER_SIDE:
            kept, dropped = nearest(place, EITHER_SIDE)
            chosen, is_cut = [*kept, *dropped], True
        for at in sorted(chosen, key=ranks.__getitem__):
            name = str(place.ids[at])
            if place.labels is not None:
                name = f"{name} {place.labels[at].replace(chr(10), chr(92) + 'n')}"
            rows.append(
                [
                    place_name(decision, place),
                    name,
                    number_text(float(place.values[at])),
                    f"{ranks[at]:,}",
                    "-" if margins is None else number_text(float(margins[at])),
                    "kept" if place.kept[at] else "dropped",
                ]
            )
    columns = ("place", decision.part, "value", "rank", "margin", "")
    title = f"{decision.part.capitalize()}s" + (" on either side of the cut" if is_cut else "")
    console.show(console.table(title, columns, rows))
