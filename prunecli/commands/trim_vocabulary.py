"""`prunecli trim-vocabulary`: keep the tokens that some text needs, write a checkpoint with those."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prunecli.commands import console
from prunecli.commands.command import command
from prunecli.commands.rewriting import RewritingOptions, WordsOptions, output_option
from prunecli.errors import UsageError
from prunecli.methods.options import VocabularyOptions
from prunecli.options import SELECTION, option

DEMO_SPLIT = "val"
"""Split of the demo's text, if none is given: its train split has every token."""


class TrimVocabulary(RewritingOptions, WordsOptions, VocabularyOptions):
    """Options of the command."""

    keep_file: Path | None = option(
        None,
        "Further tokens to keep, one on each line, as the tokenizer writes them.",
        flag="--keep",
        panel=SELECTION,
        role="input",
        recorded=False,
    )
    output: Path = output_option("trimmed-vocabulary")


@command(TrimVocabulary)
def trim_vocabulary(options: TrimVocabulary) -> None:
    """Remove the tokens that the given text does not need, from the embeddings and from the tokenizer.

    Special and added tokens, the codes of all languages, single characters, bytes and the tokens of the chat template
    are always kept. The text becomes the same tokens as before, under new ids; this is checked before anything is
    written. Other text becomes smaller tokens.
    """
    from prunecli import demo
    from prunecli.methods.vocabulary.plan import plan_vocabulary
    from prunecli.text.files import read_lines

    if options.data is None and not options.files:
        if options.checkpoint is not None:  # the demo's text would be the wrong one
            raise UsageError(
                "No text is given, from which tokens are chosen.", "Give `data`, `files`, or both."
            )
        options = options.model_copy(update={"split": options.split or DEMO_SPLIT, "demo": demo.DATA})
    with options.open() as opened:
        opened.require_architecture()
        kept = () if options.keep_file is None else filter(None, read_lines(options.keep_file))
        options = options.model_copy(update={"keep": tuple(dict.fromkeys(kept))})
        plan = plan_vocabulary(opened, options.lines(options.note), options, options.progress)
        for name in (name for name, content in plan.files.items() if content is None):
            options.note(
                f"{name} is left out: it holds the old vocabulary in a form that cannot be shortened."
            )
        options.prune(opened, plan, None, table=lambda: _show(plan.details))


def _show(details: Mapping[str, Any]) -> None:
    """Print why tokens stay, and whether the text falls into the same tokens."""
    rows = [[name, f"{count:,}"] for name, count in details["parts"].items()]
    console.table("Tokens that stay", ("why", "tokens"), rows)
    found = details["compared"]
    if found["changed"]:
        console.out(
            f"{details['text']['share_kept']:.2%} of the running tokens stay; {found['changed']:,} of "
            f"{found['sentences']:,} different texts fall into other tokens "
            f"({found['running_before']:,} -> {found['running_after']:,} in all)."
        )
    else:
        console.out(f"All {found['sentences']:,} different texts fall into the same tokens as before.")
