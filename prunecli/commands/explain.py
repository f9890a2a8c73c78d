"""`prunecli explain`: why an expert, head, hidden unit, layer or token of a result was kept or dropped."""

from pathlib import Path

import prunecli
from prunecli.commands import console
from prunecli.commands.command import AS_JSON, command
from prunecli.options import Options, argument


class Explain(Options):
    """Options of the command."""

    directory: Path = argument("A result of prunecli.", "DIR", ..., role="input")
    what: tuple[str, ...] = argument(
        'What to explain: expert 7 of layer 3; head 2 of decoder cross-attention layer 1; token "▁house". Default: '
        "where each layer was cut.",
        "WHAT",
        (),
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
    from prunecli.results.decisions import Explanation, document

    question = parse_question(options.what) if options.what else None
    explained = Explained.open(options.directory)
    if question is None:
        console.result(document(explained.decisions).to_json, explained.overview, as_json=options.as_json)
    else:
        answers = explained.answers(question)
        made = Explanation(
            format=Explanation.FORMAT,
            prunecli=prunecli.__version__,
            question=" ".join(options.what),
            answers=answers,
        )
        console.result(made.to_json, (answer.text for answer in answers), as_json=options.as_json)
