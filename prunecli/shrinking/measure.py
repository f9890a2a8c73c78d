"""The text of `shrink`, in three parts, and the measure of a model on one of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from prunecli.errors import DataError
from prunecli.evaluation.divergence import Reference
from prunecli.evaluation.embedding import cosines, text_vectors
from prunecli.model.cache import stated_count, text_config
from prunecli.model.checkpoint import Checkpoint
from prunecli.modules.devices import choose_devices
from prunecli.modules.fitting import fitting_dtype
from prunecli.modules.loading import load_model
from prunecli.modules.pooling import read_pooling
from prunecli.progress import Progress
from prunecli.results.shrinking import Quality
from prunecli.running.batches import task_batches
from prunecli.running.examples import Batch
from prunecli.running.losses import sum_losses
from prunecli.running.runner import InMemory
from prunecli.text.choice import Dataset, Text, TextChoice, columns
from prunecli.text.parallel import ParallelText, pair_name
from prunecli.text.plain import LabelledText, PlainText
from prunecli.text.tokens import load_tokenizer

SHARES = (0.6, 0.2, 0.2)
"""Parts of the text: units are scored on the first, mixtures chosen on the second, results reported on the third."""
CHARACTERS = 4
"""Characters of a token, about."""
LINE_TOKENS = 32
"""Tokens of a sentence, about."""
MOST_PAIRS = 8
CONTEXT = 512
"""Tokens of a window of plain text, if none is given."""


def parts(data: Dataset) -> tuple[Dataset, Dataset, Dataset]:
    """The text in its three parts, in its order.

    Raises:
        DataError: a part would be empty.
    """
    made, start = [], 0.0
    for share in SHARES:
        made.append(replace(data, text=_between(data.text, start, start + share)))
        start += share
    if not all(map(_length, made)):
        raise DataError("The text is too short to be divided.", "Give at least five lines of text.")
    first, second, third = made
    return first, second, third


def little(data: Dataset, tokens: int) -> Dataset:
    """The beginning of a text that has so many tokens, about.

    Of parallel text `MOST_PAIRS` are read: more pairs would leave few sentences of each.
    """
    data = replace(data, pairs=data.pairs[:: -(-len(data.pairs) // MOST_PAIRS) or 1])
    share = tokens * CHARACTERS / max(_length(data), 1)
    return replace(data, text=_between(data.text, 0.0, min(share, 1.0)))


def windowed(data: Dataset, config: Mapping[str, Any]) -> Dataset:
    """The text of a language model in windows of `CONTEXT` tokens, or of its positions, if none are asked for."""
    if data.task != "lm" or data.context is not None:
        return data
    positions = stated_count(text_config(config), "max_position_embeddings", "n_positions", "n_ctx")
    return replace(data, context=min(CONTEXT, positions or CONTEXT))


def written(data: Dataset, folder: Path, split: str) -> TextChoice:
    """Write a part of a text to files, and return the choice that reads it again."""
    folder.mkdir(parents=True, exist_ok=True)
    text = data.text
    if isinstance(text, ParallelText):
        for language, lines in text.sentences.items():
            (folder / f"{split}.{language}").write_text("\n".join(lines) + "\n", encoding="utf-8")
        return TextChoice(data=folder, pairs=",".join(pair_name(*pair) for pair in data.pairs), split=split)
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


def _length(data: Dataset) -> int:
    """Characters of a text, about; a sentence of parallel text counts as one of `LINE_TOKENS`."""
    text = data.text
    if isinstance(text, PlainText):
        return sum(map(len, text.texts))
    pairs = max(len(data.pairs), 1)
    return len(text) * pairs * LINE_TOKENS * CHARACTERS


def _between(text: Text, start: float, stop: float) -> Text:
    """The part of a text between two fractions of its length; a whole document is cut at a line end."""
    if isinstance(text, PlainText) and text.whole_files:
        found = []
        for whole in text.texts:
            first, last = (_line_end(whole, round(share * len(whole))) for share in (start, stop))
            found.append(whole[first:last])
        kept = [number for number, one in enumerate(found) if one.strip()]
        names = tuple(text.names[number] for number in kept) if text.names else ()
        return replace(text, texts=tuple(found[number] for number in kept), names=names)
    rows = slice(round(start * len(text)), max(round(stop * len(text)), round(start * len(text)) + 1))
    if isinstance(text, ParallelText):
        return replace(text, sentences={name: own[rows] for name, own in text.sentences.items()})
    names = ("texts", "names") if isinstance(text, PlainText) else ("labels", "texts", "seconds", "lines")
    return replace(text, **{name: own and own[rows] for name in names for own in (getattr(text, name),)})


def _line_end(text: str, place: int) -> int:
    """The next line end, or the place itself if there is none."""
    return max(text.find("\n", place - 1) + 1, place) if 0 < place < len(text) else place


class Measurer:
    """Measures models on one text: the original first, which the others are compared with.

    Attributes:
        original: quality of the original.

    Args:
        source: the original.
        data: the text.
        device: as in `load_model`.
    """

    def __init__(self, source: Checkpoint, data: Dataset, device: str, progress: Progress) -> None:
        self._data, self._progress = data, progress
        self._devices = choose_devices(device)
        self._dtype = fitting_dtype({str(source.path): source}, self._devices)
        self._vectors: Any = None
        self._tokens = 0
        self._reference: Reference | None = None
        self.original = self.measure(source.path, "the original")

    def measure(self, path: Path, what: str, *, same_tokens: bool = True) -> Quality:
        """Quality of the model of a checkpoint.

        Args:
            what: name of the model, for the progress.
            same_tokens: whether the model has the original's vocabulary.

        Raises:
            PruneError: a model or text that cannot be used.
        """
        model, tokenizer = load_model(path, device=self._devices, dtype=self._dtype), load_tokenizer(path)
        runner, data, what = InMemory(model), self._data, f"measuring {what}"
        if data.task == "embedding":
            texts = [one for column in columns(data.text, data.pairs).values() for one in column]
            try:
                vectors = text_vectors(
                    runner, tokenizer, read_pooling(path), texts, 2048, what=what, progress=self._progress
                )
            except DataError:
                if self._vectors is None:
                    raise
                return Quality(cost=None)
            self._vectors = vectors if self._vectors is None else self._vectors
            cosine = float(cosines(self._vectors, vectors).mean())
            return Quality(cost=1 - cosine, cosine=cosine)
        batches = [one for own in task_batches(tokenizer, model, data, 2048).values() for one in own]
        divergence = None
        if data.task == "lm" and same_tokens:
            nats, tokens, divergence = self._compared(runner, batches, what)
        else:
            nats, tokens = sum_losses(runner, batches, what, self._progress)
        self._tokens = self._tokens or tokens
        loss = nats / self._tokens  # a trimmed vocabulary cuts the text into more tokens
        if not np.isfinite(loss):
            return Quality(cost=None)
        found = {} if divergence is None else {"divergence": divergence}
        return Quality(cost=loss, loss=loss, **found)

    def _compared(
        self, runner: InMemory, batches: Sequence[Batch], what: str
    ) -> tuple[float, int, float | None]:
        """Sum of the losses, number of tokens, mean KL divergence from the original; not finite if a loss is not."""
        is_first = self._reference is None
        reference = self._reference = self._reference or Reference(batches)
        try:
            run = reference.record if is_first else reference.compare
            found = run(runner, what, self._progress)
        except DataError:
            if is_first:
                raise
            return np.inf, self._tokens, None
        tokens = int(found.tokens.sum())
        return float(found.nats.sum()), tokens, float(found.divergence.sum()) / tokens
