"""The text that `finetune` trains on and validates with, from its options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from prunecli.commands.console import note
from prunecli.commands.found import demo_text
from prunecli.errors import UsageError

if TYPE_CHECKING:
    from prunecli.data.parallel import ParallelText
    from prunecli.training.features import TrainingTask
    from prunecli.training.material import Material

TRAIN_SPLIT = "train"
VALID_SPLIT = "val"

_ENDINGS: dict[str, TrainingTask] = {
    "Model": "feature-extraction",
    "LMHeadModel": "lm",
    "ForSequenceClassification": "classification",
    "ForMaskedLM": "mlm",
}
"""Of a class with one stack -> what it is for; the longer of two endings last."""


@dataclass(frozen=True)
class TextOptions:
    """The options that name text."""

    data: Path | None
    split: str
    valid_split: str | None
    pairs: str | None
    langs: str | None
    text: Sequence[Path]
    valid_text: Sequence[Path]
    labelled: Path | None
    valid_labelled: Path | None
    max_sentences: int | None
    max_valid: int | None


def choose_task(
    asked: TrainingTask | None, class_name: str, is_pair: bool, options: TextOptions
) -> TrainingTask:
    """`asked`, or what a model of this class is for.

    Raises:
        UsageError: options that belong to another task, or text that is missing.
    """
    task: TrainingTask = "translation" if is_pair else "lm"
    for ending, own in _ENDINGS.items():
        if class_name.endswith(ending) and not (is_pair and own == "feature-extraction"):
            task = own
    task = asked or task
    plain: tuple[TrainingTask, ...] = ("lm", "mlm", "feature-extraction")
    given: dict[str, tuple[bool, tuple[TrainingTask, ...]]] = {
        "--data": (options.data is not None, ("translation",)),
        "--pairs": (options.pairs is not None, ("translation",)),
        "--langs": (options.langs is not None, ("translation",)),
        "--valid-split": (options.valid_split is not None, ("translation",)),
        "--text": (bool(options.text), plain),
        "--valid-text": (bool(options.valid_text), plain),
        "--labelled": (options.labelled is not None, ("classification",)),
        "--valid-labelled": (options.valid_labelled is not None, ("classification",)),
    }
    for name, (is_given, tasks) in given.items():
        if is_given and task not in tasks:
            raise UsageError(
                f"{name} goes with --task {' or '.join(tasks)}, this is {task}",
                "Leave it out, or give --task.",
            )
    if task in plain and not options.text:
        raise UsageError(f"{task} needs text", "Give --text FILE, one text a line.")
    if task == "classification" and options.labelled is None:
        raise UsageError(
            "a classifier needs labels", "Give --labelled FILE: label<TAB>text on every line, or JSON lines."
        )
    return task


def material_of(task: TrainingTask, options: TextOptions, quiet: bool) -> Material:
    """The text of `options`.

    Raises:
        PruneError: text that cannot be used.
    """
    from prunecli.data.labelled import read_labelled
    from prunecli.data.plain import read_plain
    from prunecli.training.material import Material

    if task == "translation":
        train, valid, pairs = _parallel(options, quiet)
        return Material(task, train, valid, pairs)
    if task == "classification":
        assert options.labelled is not None
        labelled = read_labelled(options.labelled).first(options.max_sentences)
        others = options.valid_labelled
        return Material(
            task, labelled, None if others is None else read_labelled(others).first(options.max_valid)
        )
    plain = read_plain(options.text).first(options.max_sentences)
    return Material(
        task, plain, read_plain(options.valid_text).first(options.max_valid) if options.valid_text else None
    )


def _parallel(
    options: TextOptions, quiet: bool
) -> tuple[ParallelText, ParallelText | None, tuple[tuple[str, str], ...]]:
    from prunecli import demo
    from prunecli.data.parallel import has_split, languages_of, parse_pairs, read_parallel

    data = options.data or demo.DATA
    if options.split == TRAIN_SPLIT and data.resolve() == demo.DATA.resolve():
        valid = read_parallel(data, options.valid_split or VALID_SPLIT)
        train = _demo_text()
        if options.data is None and not quiet:
            demo_text()
        pairs = parse_pairs(options.pairs, options.langs, train.languages)
    else:
        pairs = parse_pairs(options.pairs, options.langs, languages_of(data, options.split))
        needed = tuple(dict.fromkeys(name for pair in pairs for name in pair))
        train = read_parallel(data, options.split, needed)
        valid = None
        if options.valid_split is not None or has_split(data, VALID_SPLIT):
            valid = read_parallel(data, options.valid_split or VALID_SPLIT, needed)
        elif not quiet:
            note(f"No split {VALID_SPLIT!r}, no validation: the last model is the result.")
    return (
        train.first(options.max_sentences),
        None if valid is None else valid.first(options.max_valid),
        pairs,
    )


def _demo_text() -> ParallelText:
    """Training text is drawn as the bundled held-out text was."""
    from prunecli.data.parallel import ParallelText
    from prunecli.demo.corpus import parallel_text

    return ParallelText(TRAIN_SPLIT, dict(parallel_text()[TRAIN_SPLIT]))
