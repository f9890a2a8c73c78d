"""`prunecli explain`: why an expert, head, hidden unit, layer or token of a result was kept or dropped."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prunecli.commands import console
from prunecli.commands.options import JsonOption

if TYPE_CHECKING:
    from prunecli.analysis.explanation import Explained


def explain(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A result of prunecli.")],
    what: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="WHAT",
            help='What to explain: expert 7 of layer 3; head 2 of decoder cross-attention layer 1; token "▁house"; '
            "default: where each layer was cut.",
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Say why an expert, head, hidden unit, layer or token was kept or dropped, from the result's directory alone.

    Experts, heads, layers and units are numbered as in the original model. No weights are read, and the statistics need
    not be there.
    """
    from prunecli.analysis.explanation import Explained, parse_question

    question = parse_question(what) if what else None
    explained = Explained.open(directory)
    if question is None:
        _overview(explained, json=json)
        return
    answers = explained.answers(question)
    if not json:
        for answer in answers:
            console.out(console.plain(answer.text))
        return
    from prunecli import __version__
    from prunecli.results.decisions import Explanation

    asked = " ".join(what or ())
    made = Explanation(format=Explanation.FORMAT, prunecli=__version__, question=asked, answers=answers)
    console.print_json(made.to_json())


def _overview(explained: Explained, *, json: bool) -> None:
    from prunecli.commands.decision_tables import show_cuts

    if json:
        from prunecli.results.decisions import document

        console.print_json(document(explained.decisions).to_json())
        return
    for step, entry in enumerate(explained.history):
        console.out(console.plain(f"Step {step + 1}, {entry.get('command', '?')}:"))
        if step in explained.decisions:
            show_cuts(explained.decisions[step])
        else:
            console.out(explained.untold(step))
