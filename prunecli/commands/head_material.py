"""The text that heads are scored on, from the options of `score-heads`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from prunecli.errors import UsageError

if TYPE_CHECKING:
    from prunecli.checkpoint.reader import Checkpoint
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

    @property
    def parallel(self) -> str | None:
        """The first option that only translation takes."""
        given = {
            "--data": self.data,
            "--source-file": self.source_file,
            "--target-file": self.target_file,
            "--langs": self.langs,
            "--pairs": self.pairs,
        }
        return next((name for name, value in given.items() if value is not None), None)


def choose_task(checkpoint: Checkpoint, asked: TaskName | None, choice: Choice) -> TaskName:
    """`asked`, or what the text and the model's class are for.

    Raises:
        UsageError: text of another task is given, or that of this one is missing.
    """
    task = asked or _task_of(checkpoint)
    if task != "translation" and choice.parallel is not None:
        raise UsageError(f"{choice.parallel} goes with --task translation, not {task}", _REMEDIES[task])
    if task != "classification" and choice.labelled is not None:
        raise UsageError(f"--labelled goes with --task classification, not {task}", _REMEDIES[task])
    if task not in ("mlm", "lm") and choice.text:
        raise UsageError(f"--text goes with --task mlm or lm, not {task}", _REMEDIES[task])
    if task in ("mlm", "lm") and not choice.text:
        raise UsageError(f"{task} needs text", _REMEDIES[task])
    if task == "classification" and choice.labelled is None:
        raise UsageError("classification needs labels", _REMEDIES[task])
    return task


_REMEDIES: dict[str, str] = {
    "translation": "Give --data DIR, or --source-file, --target-file and --pairs.",
    "classification": "Give --labelled FILE: label<TAB>text on every line, or JSON lines.",
    "mlm": "Give --text FILE, one text a line.",
    "lm": "Give --text FILE, one text a line.",
}


def _task_of(checkpoint: Checkpoint) -> TaskName:
    from prunecli.modules.building import model_class

    name = model_class(checkpoint).__name__
    if name.endswith("ForSequenceClassification"):
        return "classification"
    if name.endswith("ForMaskedLM"):
        return "mlm"
    return "translation" if len(checkpoint.require_architecture().stacks) > 1 else "lm"


def material(task: TaskName, choice: Choice) -> Material:
    """The text of `choice`.

    Raises:
        PruneError: text that cannot be used.
    """
    from prunecli.commands.found import chosen_text
    from prunecli.data.labelled import read_labelled
    from prunecli.data.plain import read_plain
    from prunecli.methods.heads.measure import Material

    if task == "translation":
        text, pairs = chosen_text(
            choice.data, choice.split, choice.source_file, choice.target_file, choice.pairs, choice.langs
        )
        return Material(task, text.first(choice.max_sentences), pairs)
    if task == "classification":
        assert choice.labelled is not None
        return Material(task, read_labelled(choice.labelled).first(choice.max_sentences))
    return Material(task, read_plain(choice.text).first(choice.max_sentences))


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
