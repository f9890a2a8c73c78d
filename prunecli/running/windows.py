"""Texts of any length for causal language models: windows of the context in which each token is predicted once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from prunecli.errors import DataError, UnsupportedModelError, UsageError
from prunecli.modules.logits import vocabulary_size
from prunecli.running.encoding import (
    encoded,
    filling,
    require_task,
    require_tokens,
    window_length,
)
from prunecli.running.examples import IGNORED, Batch, Examples, Sequences, TokenExamples


@dataclass(frozen=True)
class Window:
    """A stretch of a text that fits the model's context.

    Attributes:
        text: number of the text.
        ids: its tokens.
        counted: so many of the last of them are predicted; the others were, by earlier windows, or start the text.
    """

    text: int
    ids: tuple[int, ...]
    counted: int

    @property
    def labels(self) -> list[int]:
        """For each token the next one if it is counted, else -100."""
        before = len(self.ids) - self.counted
        return [IGNORED] * (before - 1) + [*self.ids[before:], IGNORED]


def lm_windows(
    tokenizer: Any,
    model: Any,
    texts: Sequence[str],
    *,
    context: int | None = None,
    stride: int | None = None,
) -> list[Window]:
    """Cut texts to windows in which every token is predicted once.

    The first token is predicted from the tokenizer's start token, or its end token where it has none; with neither it
    is not counted. A window begins `stride` tokens after the one before it. By default windows overlap by the one
    token from which the first new one is predicted, so that each predicts context - 1 tokens; with a smaller `stride`
    a counted token that is not in the first window is predicted from context - stride tokens or more.

    Args:
        context: tokens of a window at most; default: see `window_length`.
        stride: default: context - 1.

    Raises:
        UnsupportedModelError: not a causal language model.
        UsageError: the model has fewer positions than `context`; `stride` is not from 1 to context - 1.
        DataError: there is no token to predict.
    """
    require_task(model, "lm")
    length = window_length(model, tokenizer, context)
    step = length - 1 if stride is None else stride
    if not 1 <= step < length:
        raise UsageError(
            f"`stride={step}`: a window has {length:,} tokens",
            "Windows must overlap: a stride is from 1 to the window's tokens - 1.",
        )
    windows = []
    for number, row in enumerate(encoded(tokenizer, model, texts)):
        ids, done = _started(tokenizer, model, row), 1  # nothing comes before the first token
        for begin in range(0, len(ids), step):
            end = min(begin + length, len(ids))
            if end > done:
                windows.append(Window(number, tuple(ids[begin:end]), end - done))
                done = end
    if not windows:
        raise DataError("the text has no token to predict")
    return windows


def window_examples(windows: Sequence[Window], pad_id: int, equal: bool = False) -> TokenExamples:
    """Windows as examples, each with the tokens that are counted in it."""
    ids, labels = ([*window.ids] for window in windows), (window.labels for window in windows)
    return TokenExamples(Sequences([*ids]), Sequences([*labels]), pad_id, equal)


def packed_examples(
    tokenizer: Any, model: Any, texts: Sequence[str], context: int | None = None, *, apart: bool = False
) -> TokenExamples:
    """Texts, each ended by the end token, cut into windows in which each token is predicted once.

    Texts follow one another: a window may hold several texts and parts of them, and attention and positions run on from
    one to the next within it, as in the training of GPT-2 (and in transformers' run_clm). Where the tokenizer has no
    end token there is none.

    Args:
        context: tokens of a window; default: see `window_length`.
        apart: each text has windows of its own.

    Raises:
        UnsupportedModelError: not a causal language model.
        UsageError: the model has fewer positions than `context`.
        DataError: there is no token to predict.
    """
    require_task(model, "lm")
    length, end = window_length(model, tokenizer, context), tokenizer.eos_token_id
    if end is not None:
        require_tokens(tokenizer, model, [[end]])
    rows = [
        ids if end is None or ids[-1:] == [end] else [*ids, end] for ids in encoded(tokenizer, model, texts)
    ]
    streams = rows if apart else [[*chain.from_iterable(rows)]]
    inputs, labels = [], []
    for stream in streams:
        ids = _started(tokenizer, model, stream)
        for start in range(0, len(ids) - 1, length):
            inputs.append(ids[start : min(start + length, len(ids) - 1)])
            labels.append(ids[start + 1 : start + 1 + length])
    if not inputs:
        raise DataError("there is no token to predict")
    return TokenExamples(Sequences(inputs), Sequences(labels), *filling(model, tokenizer))


def _started(tokenizer: Any, model: Any, ids: list[int]) -> list[int]:
    """Tokens behind the one that a text's first token is predicted from, where the tokenizer has one."""
    start = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    if start is None or ids[:1] == [start]:
        return ids
    require_tokens(tokenizer, model, [[start]])
    return [start, *ids]


MASK_PROBABILITY = 0.15
MASKED_SHARE, RANDOM_SHARE = 0.8, 0.1
"""Of the chosen tokens: so many become the mask token, so many a random one; the rest stays."""


@dataclass
class MaskedExamples(Examples):
    """Texts with some of their tokens hidden, others in each epoch (RoBERTa, 1907.11692, 4.1).

    Each token that is not a special one is chosen with a probability of 15 %, at least one of a text; of the chosen
    ones 80 % become the mask token, 10 % a random token, 10 % stay (BERT, 1810.04805, 3.1).

    Attributes:
        ids: of each text.
        numbers: of each text; with seed and epoch they determine what is hidden in it.
        special: `[tokens]` bool: those that are never hidden.
        vocabulary: the others.
        mask_id: the mask token.
    """

    ids: Sequences
    numbers: Sequence[int]
    special: NDArray[np.bool_]
    vocabulary: NDArray[np.int64]
    mask_id: int
    seed: int
    pad_id: int
    equal: bool = False
    epoch: int = 0

    @property
    def lengths(self) -> Sequence[tuple[int, int]]:
        """See `Examples`."""
        return [(length, length) for length in self.ids.lengths]

    def set_epoch(self, epoch: int) -> None:
        """See `Examples`."""
        self.epoch = epoch

    def batch(self, rows: Sequence[int]) -> Batch:
        """See `Examples`."""
        inputs = self.ids.inputs(rows, self.pad_id)
        ids = inputs["input_ids"]
        labels = torch.full_like(ids, IGNORED)
        for line, row in enumerate(rows):
            positions, tokens = self._hidden(row)
            labels[line, positions] = ids[line, positions]
            ids[line, positions] = torch.tensor(tokens)
        return Batch(inputs, labels, tuple(self.numbers[row] for row in rows))

    def _hidden(self, row: int) -> tuple[list[int], list[int]]:
        """Positions of a text's hidden tokens, and what stands there instead."""
        # An epoch of 0 changes no draw.
        random = np.random.default_rng((self.seed, self.numbers[row], self.epoch))
        ids = self.ids[row]
        words = np.flatnonzero(~self.special[ids])
        chosen = words[random.random(len(words)) < MASK_PROBABILITY].tolist()
        chosen = chosen or [int(words[random.integers(len(words))])]
        tokens = []
        for position in chosen:
            draw, token = random.random(), int(ids[position])
            if draw < MASKED_SHARE:
                token = self.mask_id
            elif draw < MASKED_SHARE + RANDOM_SHARE:
                token = int(self.vocabulary[random.integers(len(self.vocabulary))])
            tokens.append(token)
        return chosen, tokens


def mlm_examples(
    tokenizer: Any, model: Any, texts: Sequence[str], *, context: int | None = None, seed: int = 0
) -> MaskedExamples:
    """Texts, cut to `window_length`; those without a token to hide are left out.

    Args:
        context: tokens of a window; default: see `window_length`.

    Raises:
        UnsupportedModelError: the model is not a masked language model, or its tokenizer has no mask token.
        UsageError: the model has fewer positions than `context`.
        DataError: no text has a token to hide.
    """
    require_task(model, "mlm")
    if tokenizer.mask_token_id is None:
        raise UnsupportedModelError("mlm: the tokenizer has no mask token")
    require_tokens(tokenizer, model, [[tokenizer.mask_token_id]])
    special = np.zeros(max(len(tokenizer), 1 + max(tokenizer.get_vocab().values())), np.bool_)
    special[sorted(set(tokenizer.all_special_ids) - {tokenizer.unk_token_id})] = True
    options = {"truncation": True, "max_length": window_length(model, tokenizer, context)}
    rows = encoded(tokenizer, model, texts, **options)
    numbers = [number for number, ids in enumerate(rows) if not special[np.asarray(ids, np.int64)].all()]
    if not numbers:
        raise DataError("no text has a token that could be hidden")
    size = vocabulary_size(model.config) or len(tokenizer)
    return MaskedExamples(
        Sequences([rows[number] for number in numbers]),
        numbers,
        special,
        np.flatnonzero(~special[: min(len(tokenizer), size)]),
        tokenizer.mask_token_id,
        seed,
        *filling(model, tokenizer),
    )
