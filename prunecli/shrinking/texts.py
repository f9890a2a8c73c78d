"""The text of `shrink`, in three parts."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from prunecli.errors import DataError
from prunecli.evaluation.quality_check import characters_of, part_of
from prunecli.model.cache import stated_count
from prunecli.model.declared import text_config
from prunecli.text.choice import Dataset, TextChoice
from prunecli.text.parallel import ParallelText, pair_name
from prunecli.text.plain import LabelledText

ENDS = (0.0, 0.6, 0.8, 1.0)
"""Ends of the parts of the text: units are scored on the first, mixtures chosen on the second, results reported on the
third."""
CONTEXT = 512
"""Tokens of a window of plain text, if none is given."""


def parts(data: Dataset) -> tuple[Dataset, Dataset, Dataset]:
    """The text in its three parts, in its order.

    Raises:
        DataError: a part would be empty.
    """
    first, second, third = (replace(data, text=part_of(data.text, *ends)) for ends in pairwise(ENDS))
    if not all(map(characters_of, (first, second, third))):
        raise DataError("The text is too short to be divided.", "Give at least five lines of text.")
    return first, second, third


def windowed(data: Dataset, config: Mapping[str, Any]) -> Dataset:
    """The text of a language model in windows of `CONTEXT` tokens, or of its positions, if none are asked for."""
    if data.task != "lm" or data.context is not None:
        return data
    positions = stated_count(
        text_config(config), "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"
    )
    return replace(data, context=min(CONTEXT, positions or CONTEXT))


def written(data: Dataset, folder: Path, split: str) -> TextChoice:
    """Write a part of a text to files, and return the choice that reads it again."""
    folder.mkdir(parents=True, exist_ok=True)
    text = data.text
    if isinstance(text, ParallelText):
        for language, lines in text.sentences.items():
            (folder / f"{split}.{language}").write_text("\n".join(lines) + "\n", encoding="utf-8")
        return TextChoice(data=folder, pairs=tuple(pair_name(*pair) for pair in data.pairs), split=split)
    if isinstance(text, LabelledText):
        rows = zip(text.labels, text.texts, *filter(None, [text.seconds]), strict=True)
        path = folder / f"{split}.tsv"
        path.write_text("".join("\t".join(row) + "\n" for row in rows), encoding="utf-8")
        return TextChoice(labelled=path)
    names = []
    for number, one in enumerate(text.texts if text.whole_files else ["\n".join(text.texts)]):
        names.append(folder / f"{split}-{number}.txt")
        names[-1].write_text(f"{one}\n", encoding="utf-8")
    return TextChoice(files=tuple(names), whole_files=text.whole_files)
