"""Training examples of each task: token ids in flat arrays, batches as the model takes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prunecli.evaluation.losses import IGNORED
from prunecli.evaluation.objective import MASK_PROBABILITY, MASKED_SHARE, RANDOM_SHARE


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

    def model_inputs(self, rows: Sequence[int], pad_id: int) -> dict[str, Tensor]:
        """`input_ids`, filled up with `pad_id`, and their `attention_mask`."""
        ids = self.rectangle(rows, -1)
        return {"input_ids": ids.masked_fill(ids == -1, pad_id), "attention_mask": (ids != -1).long()}


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
        labels = self.targets.rectangle(rows, IGNORED)
        return {
            **self.sources.model_inputs(rows, self.pad_id),
            "decoder_input_ids": self.shift(labels),
            "decoder_attention_mask": (labels != IGNORED).long(),
            "labels": labels,
        }


@dataclass(frozen=True)
class Texts:
    """Windows for a causal language model; `labels` hold the token that follows each."""

    ids: Sequences
    labels: Sequences
    pad_id: int

    @property
    def lengths(self) -> Sequence[tuple[int, int]]:
        """See `Examples`."""
        return [(length, length) for length in self.ids.lengths]

    def batch(self, rows: Sequence[int]) -> dict[str, Tensor]:
        """See `Examples`."""
        return {
            **self.ids.model_inputs(rows, self.pad_id),
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
        made = {
            **self.inputs["input_ids"].model_inputs(rows, self.pad_id),
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
