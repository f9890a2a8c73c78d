"""Examples as token ids, and the batches of them that a model runs: one type for training and measuring."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prunecli.text.batching import length_bucketed

IGNORED = -100
"""A label that is not counted, as everywhere in transformers."""


@dataclass(frozen=True)
class Batch:
    """Examples that run together.

    Attributes:
        inputs: arguments of the model without labels, on the CPU.
        labels: `[B, T]` int64: what the logits at the same position are to predict, or -100; `[B]` in classification.
        indices: numbers of the examples in their text.
    """

    inputs: dict[str, Tensor]
    labels: Tensor
    indices: tuple[int, ...]

    @property
    def with_labels(self) -> dict[str, Tensor]:
        """The inputs and `labels`, as transformers' Trainer hands a batch on."""
        return {**self.inputs, "labels": self.labels}

    def arguments(self, model: Any) -> dict[str, Any]:
        """The inputs on the device of `model`, which is told not to cache keys and values where it could."""
        inputs: dict[str, Any] = {name: value.to(model.device) for name, value in self.inputs.items()}
        if "use_cache" in inspect.signature(model.forward).parameters:
            inputs["use_cache"] = False
        return inputs


class Examples(ABC):
    """Examples of one task; an example's rows of a batch do not depend on the others, padding apart."""

    max_rows: int | None = None
    """Examples of a batch at most, where the number of tokens is not all that bounds them."""
    equal: bool = False
    """Whether a batch holds examples of one length alone: the model's outputs depend on padding."""

    @property
    @abstractmethod
    def lengths(self) -> Sequence[tuple[int, int]]:
        """Tokens of each, as (input, output)."""

    @abstractmethod
    def batch(self, rows: Sequence[int]) -> Batch:
        """These examples."""

    def batches(self, batch_tokens: int) -> list[Batch]:
        """All examples, those of like lengths together: see `length_bucketed`."""
        return [
            self.batch(rows)
            for rows in length_bucketed(self.lengths, batch_tokens, self.max_rows, equal=self.equal)
        ]

    def set_epoch(self, epoch: int) -> None:  # noqa: B027
        """Which epoch the batches from now on are of."""


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

    def __getitem__(self, row: int) -> NDArray[np.int32]:
        return self.ids[self.offsets[row] : self.offsets[row + 1]]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence."""
        return [int(length) for length in np.diff(self.offsets)]

    def padded(self, rows: Sequence[int], padding: int) -> Tensor:
        """`[rows, longest]` int64, filled up on the right."""
        lengths = np.diff(self.offsets)[list(rows)]
        ids = np.full((len(rows), int(lengths.max(initial=0))), padding, np.int64)
        for line, row, length in zip(ids, rows, lengths, strict=True):
            line[:length] = self[row]
        return torch.from_numpy(ids)

    def inputs(self, rows: Sequence[int], pad_id: int) -> dict[str, Tensor]:
        """`input_ids`, filled up with `pad_id`, and their `attention_mask`."""
        ids = self.padded(rows, -1)
        return {"input_ids": ids.masked_fill(ids == -1, pad_id), "attention_mask": (ids != -1).long()}


@dataclass(frozen=True)
class TextExamples(Examples):
    """Texts, or windows of them, for a model with one stack.

    Attributes:
        labels: of every token.
    """

    ids: Sequences
    labels: Sequences
    pad_id: int
    equal: bool = False

    @property
    def lengths(self) -> Sequence[tuple[int, int]]:
        """See `Examples`."""
        return [(length, length) for length in self.ids.lengths]

    def batch(self, rows: Sequence[int]) -> Batch:
        """See `Examples`."""
        return Batch(self.ids.inputs(rows, self.pad_id), self.labels.padded(rows, IGNORED), tuple(rows))


@dataclass(frozen=True)
class TranslationExamples(Examples):
    """Sources with their references, for teacher forcing.

    Attributes:
        shift: from labels `[B, T]` to the decoder's inputs.
    """

    sources: Sequences
    targets: Sequences
    pad_id: int
    shift: Callable[[Tensor], Tensor]

    @property
    def lengths(self) -> Sequence[tuple[int, int]]:
        """See `Examples`."""
        return list(zip(self.sources.lengths, self.targets.lengths, strict=True))

    def batch(self, rows: Sequence[int]) -> Batch:
        """See `Examples`."""
        labels = self.targets.padded(rows, IGNORED)
        inputs = {
            **self.sources.inputs(rows, self.pad_id),
            "decoder_input_ids": self.shift(labels),
            "decoder_attention_mask": (labels != IGNORED).long(),
        }
        return Batch(inputs, labels, tuple(rows))


@dataclass(frozen=True)
class LabelledExamples(Examples):
    """Texts, or pairs of them, with their classes.

    Attributes:
        inputs: `input_ids`, and `token_type_ids` where the tokenizer gives any.
        classes: `[examples]` int64.
    """

    inputs: dict[str, Sequences]
    classes: Tensor
    pad_id: int
    max_rows: int | None = None

    @property
    def lengths(self) -> Sequence[tuple[int, int]]:
        """See `Examples`."""
        return [(length, length) for length in self.inputs["input_ids"].lengths]

    def batch(self, rows: Sequence[int]) -> Batch:
        """See `Examples`."""
        inputs = self.inputs["input_ids"].inputs(rows, self.pad_id)
        if "token_type_ids" in self.inputs:
            inputs["token_type_ids"] = self.inputs["token_type_ids"].padded(rows, 0)
        return Batch(inputs, self.classes[list(rows)], tuple(rows))
