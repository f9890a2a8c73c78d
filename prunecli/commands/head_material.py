"""The text that heads are scored on, from the options of `score-heads`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from prunecli.errors import UsageError

if TYPE_CHECKING:
    from prunecli.evaluation.losses import TaskName
    from prunecli.methods.heads.measure import Material


@dataclass(frozen=True)
class Choice:
    """The options that name text."""

    data: Path | None
    split: str
    source_file: Path | None
    target_file: Path | None
    langs: str | None
    pairs: str | None
    text: tuple[Path, ...]
    labelled: Path | None
    max_sentences: int | None
    context: int | None

    @property
    def given(self) -> dict[str, bool]:
        """Option -> whether it was given."""
        return {
            "--data": self.data is not None,
            "--source-file": self.source_file is not None,
            "--target-file": self.target_file is not None,
            "--langs": self.langs is not None,
            "--pairs": self.pairs is not None,
            "--labelled": self.labelled is not None,
            "--text": bool(self.text),
            "--context": self.context is not None,
        }


def material(task: TaskName, choice: Choice) -> Material:
    """The text of `choice`.

    Raises:
        PruneError: text that cannot be used.
    """
    from prunecli.commands.found import chosen_text
    from prunecli.methods.heads.measure import Material
    from prunecli.text.labelled import read_labelled
    from prunecli.text.plain import read_plain

    if task == "translation":
        text, pairs = chosen_text(
            choice.data, choice.split, choice.source_file, choice.target_file, choice.pairs, choice.langs
        )
        return Material(task, text.first(choice.max_sentences), pairs)
    if task == "classification":
        assert choice.labelled is not None
        return Material(task, read_labelled(choice.labelled).first(choice.max_sentences))
    return Material(task, read_plain(choice.text).first(choice.max_sentences), context=choice.context)


def selection(
    task: TaskName, choice: Choice, select_data: Path | None, select_split: str | None
) -> Material | None:
    """The text that heads are chosen on, where it is another than the one that they are reported on.

    Raises:
        UsageError: --select-split without splits.
        PruneError: text that cannot be used.
    """
    if select_data is None and select_split is None:
        return None
    if task == "translation":
        if choice.source_file is not None and select_data is None:
            raise UsageError("--select-split: the text has no splits", "Name a directory with --select-data.")
        from prunecli import demo

        other = replace(
            choice,
            data=select_data or choice.data or demo.DATA,
            split=select_split or choice.split,
            source_file=None,
            target_file=None,
        )
    elif select_split is not None or select_data is None:
        raise UsageError("--select-split: the text has no splits", "Name a file with --select-data.")
    elif task == "classification":
        other = replace(choice, labelled=select_data)
    else:
        other = replace(choice, text=(select_data,))
    return material(task, other)
