"""`prunecli explain`: why an expert, head, hidden unit, layer or token of a result was kept or dropped."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import prunecli
from prunecli.commands import console
from prunecli.commands.command import AS_JSON, command
from prunecli.options import Options, argument


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
    from prunecli.analysis.explanation import Explained, cut_blocks, parse_question

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
