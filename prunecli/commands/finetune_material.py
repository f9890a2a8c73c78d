"""The text that `finetune` trains on and validates with, from its options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from prunecli.commands.console import note
from prunecli.commands.found import demo_text

if TYPE_CHECKING:
    from prunecli.text.parallel import ParallelText
    from prunecli.training.features import TrainingTask
    from prunecli.training.material import Material

VALID_SPLIT = "val"


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
    context: int | None = None

    @property
    def given(self) -> dict[str, bool]:
        """Option -> whether it was given."""
        return {
            "--data": self.data is not None,
            "--pairs": self.pairs is not None,
            "--langs": self.langs is not None,
            "--valid-split": self.valid_split is not None,
            "--text": bool(self.text),
            "--valid-text": bool(self.valid_text),
            "--context": self.context is not None,
            "--labelled": self.labelled is not None,
            "--valid-labelled": self.valid_labelled is not None,
        }


def material_of(task: TrainingTask, options: TextOptions, quiet: bool) -> Material:
    """The text of `options`.

    Raises:
        PruneError: text that cannot be used.
    """
    from prunecli.text.labelled import read_labelled
    from prunecli.text.plain import read_plain
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
    from prunecli.text.parallel import has_split, languages_of, parse_pairs, read_parallel

    data = options.data or (demo.DATA if quiet else demo_text())
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
