"""`prunecli trim-vocabulary`: keep the tokens that some text needs, write a checkpoint with those."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from prunecli.commands import console
from prunecli.commands.groups import Helps, Without, flattened
from prunecli.commands.options import (
    CheckpointArgument,
    DataOption,
    SelectionOptions,
    StreamOption,
    TextFilesOption,
)
from prunecli.commands.rewriting import How
from prunecli.errors import UsageError

DEMO_SPLIT = "val"
"""Of the demo's text, where no --split is given: in its train every token occurs."""


@flattened
def trim_vocabulary(
    checkpoint: CheckpointArgument = None,
    data: DataOption = None,
    split: Annotated[
        str | None,
        typer.Option(
            metavar="A,B",
            help="Splits of the text. Default: train, val and dev, those that there are.",
        ),
    ] = None,
    langs: Annotated[
        str | None,
        typer.Option(
            metavar="A,B",
            help="Languages of --data whose text is read; default: all. The codes of other languages stay too.",
        ),
    ] = None,
    text: TextFilesOption = None,
    min_count: Annotated[
        int,
        typer.Option(
            min=1,
            help="Occurrences that a token needs. Above 1, rare words fall into more and smaller tokens than before.",
        ),
    ] = 1,
    selection: Annotated[
        SelectionOptions,
        Without({"ratio", "count", "least", "uniform", "seed"}),
        Helps(
            keep="Further tokens to keep, one a line, as the tokenizer writes them.",
            multiple_of="Keep more tokens, up to a multiple of N (8, 64: fast on GPUs).",
        ),
    ] = SelectionOptions(),
    stream: StreamOption = False,
    how: How = How(Path("trimmed-vocabulary")),
) -> None:
    """Remove the tokens that the given text does not need, from the embeddings and from the tokenizer.

    Special and added tokens, language codes, single characters and bytes always stay, and so does what the chat
    template writes. The text falls into the same tokens as before, under new ids, as whole files, as single lines and
    as chat messages; this is checked before anything is written. Other text falls into smaller tokens.
    """
    from prunecli import demo
    from prunecli.methods.vocabulary.plan import VocabularyOptions, plan_vocabulary
    from prunecli.text.choice import TextChoice
    from prunecli.text.files import read_lines

    choice = TextChoice(data=data, split=split, langs=langs, files=tuple(text or ()))
    if data is None and not text:
        if checkpoint is not None:  # for which the demo's text would be the wrong one
            raise UsageError(
                "No text is given, and it says which tokens stay.", "Give --data DIR, --text FILE, or both."
            )
        choice = replace(choice, split=split or DEMO_SPLIT, demo=demo.DATA)
    with how.open(checkpoint, stream=stream) as opened:
        how.refuse(opened)
        kept = [] if selection.keep is None else filter(None, read_lines(selection.keep))
        options = selection.of(VocabularyOptions, min_count=min_count, keep=tuple(dict.fromkeys(kept)))
        plan = plan_vocabulary(opened, choice.lines(how.note), options, how.progress)
        for name in (name for name, content in plan.files.items() if content is None):
            how.note(f"{name} is left out: it holds the old vocabulary in a form that cannot be shortened.")
        how.prune(opened, plan, None, table=lambda: _show(plan.details), **plan.details)


def _show(details: Mapping[str, Any]) -> None:
    """Print why tokens stay, and whether the text falls into the same tokens."""
    rows = [[name, f"{count:,}"] for name, count in details["parts"].items()]
    console.show(console.table("Tokens that stay", ("why", "tokens"), rows))
    found = details["compared"]
    if found["changed"]:
        console.out(
            f"{details['text']['share_kept']:.2%} of the running tokens stay; {found['changed']:,} of "
            f"{found['sentences']:,} different texts fall into other tokens "
            f"({found['running_before']:,} -> {found['running_after']:,} in all)."
        )
    else:
        console.out(f"All {found['sentences']:,} different texts fall into the same tokens as before.")
