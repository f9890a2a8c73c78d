"""`prunecli explain`: why an expert, head, hidden unit, layer or token of a result was kept or dropped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import prunecli
from prunecli.commands import console
from prunecli.commands.command import AS_JSON, command
from prunecli.options import Options, argument

if TYPE_CHECKING:
    from prunecli.model.decision import Decision


class Explain(Options):
    """Options of the command."""

    directory: Path = argument(..., "A result of prunecli.", "DIR", role="input")
    what: tuple[str, ...] = argument(
        (),
        'What to explain: expert 7 of layer 3; head 2 of decoder cross-attention layer 1; token "▁house". Default: '
        "where each layer was cut.",
        "WHAT",
        repeated=True,
    )
    as_json: bool = AS_JSON


@command(Explain)
def explain(options: Explain) -> None:
    """Say why an expert, head, hidden unit, layer or token was kept or dropped, from the result's directory alone.

    Experts, heads, layers and units are numbered as in the original model. No weights are read, and the statistics need
    not be there.
    """
    from prunecli.analysis.explanation import Explained, parse_question

    question = parse_question(options.what) if options.what else None
    explained = Explained.open(options.directory)
    if question is None:
        from prunecli.results.decisions import document

        decisions = document(explained.decisions)

        def overview() -> Iterator[Any]:
            for step, entry in enumerate(explained.structure.history):
                yield f"Step {step + 1}, {entry['command']}:"
                if step in explained.decisions:
                    yield from cut_blocks(explained.decisions[step])
                else:
                    yield explained.untold(step)

        console.result(decisions.to_json, overview(), as_json=options.as_json)
        return
    answers = explained.answers(question)
    if not options.as_json:
        console.show(answer.text for answer in answers)
        return
    from prunecli.results.decisions import Explanation

    asked = " ".join(options.what)
    made = Explanation(
        format=Explanation.FORMAT, prunecli=prunecli.__version__, question=asked, answers=answers
    )
    console.print_json(made.to_json())


EITHER_SIDE = 4
"""Number of units on each side of a cut that --explain shows; all units of an axis with no more than twice that."""


def cut_blocks(decision: Decision) -> Iterator[Any]:
    """Yield the metric and the text, and a row for each axis."""
    from prunecli.analysis.explanation import cuts, summary

    yield from summary(decision)
    if decision.metric is not None:
        yield cuts(decision)


def decision_blocks(decision: Decision | None) -> Iterator[Any]:
    """Yield the cut on each axis, then the units on either side of it, highest first; all units of small axes."""
    if decision is None:
        yield "Nothing was chosen by a value, or among parts: the options say it all."
        return
    yield from cut_blocks(decision)
    if decision.metric is None:
        return
    from prunecli.analysis.explanation import nearest, place_name
    from prunecli.results.document import number_text

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
                {
                    "place": place_name(decision, place),
                    decision.part: name,
                    "value": number_text(float(place.values[at])),
                    "rank": f"{ranks[at]:,}",
                    "margin": None if margins is None else number_text(float(margins[at])),
                    "": "kept" if place.kept[at] else "removed",
                }
            )
    title = f"{decision.part.capitalize()}s" + (" on either side of the cut" if is_cut else "")
    yield console.table(title, rows)
