"""`prunecli explain`: why an expert, head, hidden unit, layer or token of a result was kept or dropped."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from prunecli.commands import console
from prunecli.commands.command import command
from prunecli.options import Options, argument, option

if TYPE_CHECKING:
    from prunecli.analysis.explanation import Explained


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
    as_json: bool = option(False, "Print the result as JSON.", flag="--json")


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
        _overview(explained, json=options.as_json)
        return
    answers = explained.answers(question)
    if not options.as_json:
        for answer in answers:
            console.out(console.plain(answer.text))
        return
    from prunecli import __version__
    from prunecli.results.decisions import Explanation

    asked = " ".join(options.what)
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
