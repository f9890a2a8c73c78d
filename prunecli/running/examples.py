"""Examples as token ids, and the batches of them that a model runs: one type for training and measuring."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from prunecli.text.batching import length_bucketed, pad

IGNORED = -100
"""A label that is not counted, as everywhere in transformers."""


@dataclass(frozen=True)
class Batch:
    """Examples that run together.

    Attributes:
        inputs: arguments of the model without labels, on the CPU.
        labels: `[B, T]` int64: what the logits at the same position are to predict, or -100; `[B]` in classification.
        indices: numbers of the examples in their text.
        text: name of the text in messages, if there are several texts.
    """

    inputs: dict[str, Tensor]
    labels: Tensor
    indices: tuple[int, ...]
    text: str = ""

    @property
    def tokens(self) -> int:
        """Number of tokens that are read, padding aside."""
        return int(self.inputs["attention_mask"].sum())

    @property
    def with_labels(self) -> dict[str, Tensor]:
        """The inputs and `labels`, as transformers' Trainer hands a batch on."""
        return {**self.inputs, "labels": self.labels}

    def arguments(self, model: Any) -> dict[str, Any]:
        """The inputs on the device of `model`, which is told not to cache keys and values where it could."""
        inputs: dict[str, Any] = {name: value.to(model.device) for name, value in self.inputs.items()}
        # A class that hands all arguments on, as BART's decoder alone does, names none.
        if not {"use_cache", "args"}.isdisjoint(inspect.signature(model.forward).parameters):
            inputs["use_cache"] = False
        return inputs


def num_examples(batches: Sequence[Batch]) -> int:
    """Number of examples in the batches."""
    return sum(len(batch.indices) for batch in batches)


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

    def cut(self, batch_tokens: int, order: Sequence[int] | None = None) -> list[list[int]]:
        """The examples of each batch, those of like lengths together: see `length_bucketed`.

        Args:
            order: of all examples, for those of equal lengths.
        """
        lengths = self.lengths
        rows = range(len(lengths)) if order is None else order
        found = length_bucketed([lengths[row] for row in rows], batch_tokens, self.max_rows, equal=self.equal)
        return [[rows[place] for place in batch] for batch in found]

    def batches(self, batch_tokens: int) -> list[Batch]:
        """All examples: see `cut`."""
        return [self.batch(rows) for rows in self.cut(batch_tokens)]

    def set_epoch(self, epoch: int) -> None:  # noqa: B027
        """Which epoch the batches from now on are of."""


class Sequences:
    """Sequences of token ids in one array of four bytes a token."""

    def __init__(self, rows: Sequence[Sequence[int]]) -> None:
        self.offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum([len(row) for row in rows], out=self.offsets[1:])
        self.ids = np.fromiter((token for row in rows for token in row), np.int32, int(self.offsets[-1]))

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
        return pad([self[row] for row in rows], padding)[0]

    def inputs(self, rows: Sequence[int], pad_id: int) -> dict[str, Tensor]:
        """`input_ids`, filled up with `pad_id`, and their `attention_mask`."""
        ids, mask = pad([self[row] for row in rows], pad_id)
        return {"input_ids": ids, "attention_mask": mask}


@dataclass(frozen=True)
class TokenExamples(Examples):
    """Texts, windows of them, or pairs of texts, with what is to be predicted of each.

    Attributes:
        ids: the model's inputs.
        labels: of every token, or of every token of the decoder; or classes, `[examples]` int64.
        pad_id: fills up inputs.
        types: `token_type_ids`, if the tokenizer returns any.
        shift: from labels `[B, T]` to the decoder's inputs; None: there is no decoder.
        more: returns further inputs of a batch of these examples; None: there are none.
        beside: sequences of another model, which `more` adds: their lengths bound a batch too. None: there are none.
    """

    ids: Sequences
    labels: Sequences | Tensor
    pad_id: int
    equal: bool = False
    types: Sequences | None = None
    shift: Callable[[Tensor], Tensor] | None = None
    max_rows: int | None = None
    more: Callable[[Sequence[int]], Mapping[str, Any]] | None = None
    beside: Sequences | None = None

    @property
    def lengths(self) -> Sequence[tuple[int, int]]:
        """See `Examples`."""
        outputs = self.beside or self.ids
        if self.shift is not None and isinstance(self.labels, Sequences):
            outputs = self.labels
        return list(zip(self.ids.lengths, outputs.lengths, strict=True))

    def batch(self, rows: Sequence[int]) -> Batch:
        """See `Examples`."""
        inputs = {**(self.more(rows) if self.more else {}), **self.ids.inputs(rows, self.pad_id)}
        if self.types is not None:
            inputs["token_type_ids"] = self.types.padded(rows, 0)
        if isinstance(self.labels, Tensor):
            return Batch(inputs, self.labels[list(rows)], tuple(rows))
        labels = self.labels.padded(rows, IGNORED)
        if self.shift is not None:
            inputs["decoder_input_ids"] = self.shift(labels)
            inputs["decoder_attention_mask"] = (labels != IGNORED).long()
        return Batch(inputs, labels, tuple(rows))
