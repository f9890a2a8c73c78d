"""Encoded text as training examples, for each thing that a model is trained for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, compress
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prunecli.data.labelled import LabelledText, label_ids
from prunecli.data.parallel import ParallelText
from prunecli.data.tokens import encode, tokenized
from prunecli.errors import DataError, UnsupportedModelError
from prunecli.evaluation.decoding import max_positions
from prunecli.evaluation.losses import IGNORED, context_length, encoded, padding_id, require_task
from prunecli.evaluation.objective import MASK_PROBABILITY, MASKED_SHARE, RANDOM_SHARE, decoder_inputs
from prunecli.evaluation.windows import lm_windows
from prunecli.progress import Progress, silent

AT_ONCE = 1 << 12
"""Lines that are tokenised between two reports."""


class Examples(Protocol):
    """Examples of one task."""

    @property
    def lengths(self) -> Sequence[tuple[int, int]]:
        """Tokens of each, as (input, output)."""

    def batch(self, rows: Sequence[int]) -> dict[str, Tensor]:
        """Arguments of the model for these examples, and `labels`, of which the logits at the same place are scored.

        `labels` are -100 where nothing is scored.
        """


class Sequences:
    """Sequences of token ids in one array: four bytes a token."""

    def __init__(self, rows: Sequence[Sequence[int]]) -> None:
        self.offsets: NDArray[np.int64] = np.zeros(len(rows) + 1, np.int64)
        np.cumsum([len(row) for row in rows], out=self.offsets[1:])
        self.ids: NDArray[np.int32] = np.fromiter(
            (token for row in rows for token in row), np.int32, int(self.offsets[-1])
        )

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence."""
        return [int(length) for length in np.diff(self.offsets)]

    def rectangle(self, rows: Sequence[int], padding: int) -> Tensor:
        """`[rows, longest]` int64, filled up on the right."""
        starts, ends = self.offsets[list(rows)], self.offsets[np.asarray(rows) + 1]
        made = np.full((len(rows), int((ends - starts).max(initial=0))), padding, np.int64)
        for line, start, end in zip(made, starts, ends, strict=True):
            line[: end - start] = self.ids[start:end]
        return torch.from_numpy(made)


@dataclass(frozen=True)
class Translations:
    """Sources with their translations, for teacher forcing."""

    sources: Sequences
    targets: Sequences
    pad_id: int
    shift: Callable[[Tensor], Tensor]

    @property
    def lengths(self) -> Sequence[tuple[int, int]]:
        """See `Examples`."""
        return list(zip(self.sources.lengths, self.targets.lengths, strict=True))

    def batch(self, rows: Sequence[int]) -> dict[str, Tensor]:
        """See `Examples`."""
        ids = self.sources.rectangle(rows, -1)
        labels = self.targets.rectangle(rows, IGNORED)
        return {
            "input_ids": ids.masked_fill(ids == -1, self.pad_id),
            "attention_mask": (ids != -1).long(),
            "decoder_input_ids": self.shift(labels),
            "decoder_attention_mask": (labels != IGNORED).long(),
            "labels": labels,
        }


@dataclass(frozen=True)
class Texts:
    """Windows of texts for a causal language model; `labels` hold the token that follows."""

    ids: Sequences
    labels: Sequences
    pad_id: int

    @property
    def lengths(self) -> Sequence[tuple[int, int]]:
        """See `Examples`."""
        return [(length, length) for length in self.ids.lengths]

    def batch(self, rows: Sequence[int]) -> dict[str, Tensor]:
        """See `Examples`."""
        ids = self.ids.rectangle(rows, -1)
        return {
            "input_ids": ids.masked_fill(ids == -1, self.pad_id),
            "attention_mask": (ids != -1).long(),
            "labels": self.labels.rectangle(rows, IGNORED),
        }


@dataclass(frozen=True)
class Labelled:
    """Texts with their classes."""

    inputs: dict[str, Sequences]
    labels: Tensor
    pad_id: int

    @property
    def lengths(self) -> Sequence[tuple[int, int]]:
        """See `Examples`."""
        return [(length, length) for length in self.inputs["input_ids"].lengths]

    def batch(self, rows: Sequence[int]) -> dict[str, Tensor]:
        """See `Examples`."""
        ids = self.inputs["input_ids"].rectangle(rows, -1)
        made = {
            "input_ids": ids.masked_fill(ids == -1, self.pad_id),
            "attention_mask": (ids != -1).long(),
            "labels": self.labels[list(rows)],
        }
        if "token_type_ids" in self.inputs:
            made["token_type_ids"] = self.inputs["token_type_ids"].rectangle(rows, 0)
        return made


@dataclass
class Masked:
    """Texts with some of their tokens hidden, others in each epoch (BERT, 1810.04805, 3.1; RoBERTa, 1907.11692, 4.1).

    Attributes:
        ids: of each text.
        special: `[vocabulary]` bool: tokens that are never hidden.
        words: the others.
        mask_id: the mask token.
        seed, epoch: with the number of a text they determine what is hidden in it.
    """

    ids: Sequences
    special: NDArray[np.bool_]
    words: NDArray[np.int64]
    mask_id: int
    pad_id: int
    seed: int
    epoch: int = 0

    @property
    def lengths(self) -> Sequence[tuple[int, int]]:
        """See `Examples`."""
        return [(length, length) for length in self.ids.lengths]

    def set_epoch(self, epoch: int) -> None:
        """What is hidden from now on."""
        self.epoch = epoch

    def batch(self, rows: Sequence[int]) -> dict[str, Tensor]:
        """See `Examples`."""
        ids = self.ids.rectangle(rows, -1)
        mask = ids != -1
        shown, labels = ids.masked_fill(~mask, self.pad_id), torch.full_like(ids, IGNORED)
        for line, row in enumerate(rows):
            places, values = self._hidden(row)
            labels[line, places] = ids[line, places]
            shown[line, places] = values
        return {"input_ids": shown, "attention_mask": mask.long(), "labels": labels}

    def _hidden(self, row: int) -> tuple[Tensor, Tensor]:
        """Where a text's hidden tokens are, at least one, and what stands there: the mask, a random token, or they."""
        random = np.random.default_rng((self.seed, self.epoch, row))
        ids = self.ids.ids[self.ids.offsets[row] : self.ids.offsets[row + 1]].astype(np.int64)
        words = np.flatnonzero(~self.special[ids])
        chosen = words[random.random(len(words)) < MASK_PROBABILITY]
        if not len(chosen):
            chosen = random.choice(words, 1)
        draws = random.random(len(chosen))
        values = np.where(
            draws < MASKED_SHARE + RANDOM_SHARE, random.choice(self.words, len(chosen)), ids[chosen]
        )
        values[draws < MASKED_SHARE] = self.mask_id
        return torch.from_numpy(chosen), torch.from_numpy(values)


def translations(
    tokenizer: Any,
    model: Any,
    text: ParallelText,
    pairs: Sequence[tuple[str, str]],
    progress: Progress = silent,
) -> Translations:
    """The sentences of all `pairs`; a line that is blank on either side is left out, what is too long is cut.

    Raises:
        UnsupportedModelError: not an encoder with a decoder.
        DataError: the tokenizer lacks a language, or every line is blank.
    """
    require_task(model, "translation")
    positions = max_positions(model)
    longest = None if positions is None else positions - 1
    rows = _tokenised(tokenizer, text, pairs, longest, progress)
    filled = {name: [bool(line.strip()) for line in text.sentences[name]] for name, _ in rows}
    sources: list[list[int]] = []
    targets: list[list[int]] = []
    for source, target in pairs:
        kept = [one and other for one, other in zip(filled[source], filled[target], strict=True)]
        sources += compress(rows[source, False], kept)
        targets += compress(rows[target, True], kept)
    if not sources:
        raise DataError(f"{text.split}: every line is blank in one of the languages", "Give other text.")
    shift = partial(decoder_inputs, model)
    return Translations(Sequences(sources), Sequences(targets), padding_id(model, tokenizer), shift)


def _tokenised(
    tokenizer: Any,
    text: ParallelText,
    pairs: Sequence[tuple[str, str]],
    longest: int | None,
    progress: Progress,
) -> dict[tuple[str, bool], list[list[int]]]:
    """Token ids of each line, once for each (language, whether as a target), however many pairs it is in."""
    roles = ((source, False) for source, _ in pairs), ((target, True) for _, target in pairs)
    rows: dict[tuple[str, bool], list[list[int]]] = {role: [] for role in chain(*roles)}
    with progress("tokenising", len(rows) * len(text), "lines") as advance:
        for (name, as_target), made in rows.items():
            for start in range(0, len(text), AT_ONCE):
                lines = text.sentences[name][start : start + AT_ONCE]
                made += encode(tokenizer, lines, name, as_target=as_target, max_length=longest)
                advance(len(lines))
    return rows


def texts(tokenizer: Any, model: Any, lines: Sequence[str]) -> Texts:
    """Windows of the model's context in which each token is predicted once.

    Raises:
        UnsupportedModelError: not a causal language model.
        DataError: there is no token to predict.
    """
    require_task(model, "lm")
    context = context_length(model, tokenizer)
    windows = lm_windows(tokenizer, model, lines, stride=None if context is None else max(1, context - 1))
    ids = Sequences([window.ids for window in windows])
    labels = Sequences(
        [
            [IGNORED] * (len(window.ids) - window.counted - 1) + [*window.ids[-window.counted :], IGNORED]
            for window in windows
        ]
    )
    return Texts(ids, labels, padding_id(model, tokenizer))


def labelled(tokenizer: Any, model: Any, text: LabelledText) -> Labelled:
    """Texts, or pairs of them, with their classes; what is longer than the model's positions is cut.

    Raises:
        UnsupportedModelError: the model has no classification head.
        DataError: a label that the model does not know.
    """
    require_task(model, "classification")
    labels = label_ids(text, model.config.id2label)
    options = {"truncation": True, "max_length": context_length(model, tokenizer), "verbose": False}
    seconds = None if text.seconds is None else list(text.seconds)
    made = tokenized(tokenizer, list(text.texts), seconds, **options)
    names = [name for name in ("input_ids", "token_type_ids") if name in made]
    return Labelled(
        {name: Sequences(made[name]) for name in names}, torch.tensor(labels), padding_id(model, tokenizer)
    )


def masked(tokenizer: Any, model: Any, lines: Sequence[str], seed: int) -> Masked:
    """Texts for a masked language model; those without a token to hide are left out, what is too long is cut.

    Raises:
        UnsupportedModelError: not a masked language model, or its tokenizer has no mask token.
        DataError: no text has a token to hide.
    """
    require_task(model, "mlm")
    if tokenizer.mask_token_id is None:
        raise UnsupportedModelError("mlm: the tokenizer has no mask token")
    special = np.zeros(max(tokenizer.get_vocab().values()) + 1, np.bool_)
    special[sorted(set(tokenizer.all_special_ids) - {tokenizer.unk_token_id})] = True
    cut = {"truncation": True, "max_length": context_length(model, tokenizer)}
    rows = [ids for ids in encoded(tokenizer, lines, **cut) if not all(special[token] for token in ids)]
    if not rows:
        raise DataError("no text has a token that could be hidden")
    words = np.flatnonzero(~special)
    return Masked(
        Sequences(rows), special, words, tokenizer.mask_token_id, padding_id(model, tokenizer), seed
    )
