"""Texts for a masked language model, a share of whose tokens are hidden (BERT, 1810.04805, 3.1).

Each token that is not a special one is chosen with a probability of 15 %, at least one of a text; of the chosen ones
80 % become the mask token, 10 % a random token, 10 % stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from prunecli.errors import DataError, UnsupportedModelError
from prunecli.running.encoding import encoded, padding_id, require_task, require_tokens
from prunecli.running.examples import IGNORED, Batch, Examples, Sequences
from prunecli.running.lengths import vocabulary_size, window_length

MASK_PROBABILITY = 0.15
MASKED_SHARE, RANDOM_SHARE = 0.8, 0.1
"""Of the chosen tokens: so many become the mask token, so many a random one; the rest stays."""


@dataclass
class MaskedExamples(Examples):
    """Texts with some of their tokens hidden, others in each epoch (RoBERTa, 1907.11692, 4.1).

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
    pad_id: int
    seed: int
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
        padding_id(model, tokenizer),
        seed,
    )
