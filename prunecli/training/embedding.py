"""A model learns the vectors that a teacher makes of the same texts: its examples, and its loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from prunecli.errors import UsageError
from prunecli.model.checkpoint import directory_of
from prunecli.modules.pooling import Pooling, read_pooling
from prunecli.progress import Say, unsaid
from prunecli.running.encoding import embedding_examples
from prunecli.running.examples import Batch, Examples
from prunecli.text.tokens import Tokenizer, load_tokenizer
from prunecli.training.loss import Objective, hidden_distance
from prunecli.training.options import LossOptions

TAUGHT = "taught_"
"""Begins the names of a teacher's inputs in a batch."""


@dataclass(frozen=True)
class Lesson:
    """How texts become vectors.

    Attributes:
        teacher: in evaluation mode.
        pooling, taught: the model's and the teacher's.
        tokenizer: the teacher's, where a text falls into other tokens than the model's; None: into the same.
    """

    teacher: Any
    pooling: Pooling
    taught: Pooling
    tokenizer: Tokenizer | None

    def examples(
        self, tokenizer: Tokenizer, model: Any, texts: Sequence[str], context: int | None = None
    ) -> Examples:
        """Of each text its tokens, and those of the teacher where they are others.

        Raises:
            PruneError: as `embedding_examples`.
        """
        own = embedding_examples(tokenizer, model, self.pooling, texts, context)
        if self.tokenizer is None:
            return own
        return TaughtExamples(
            own, embedding_examples(self.tokenizer, self.teacher, self.taught, texts, context)
        )


def lesson(
    source: Path, model: Any, tokenizer: Tokenizer, path: Path, teacher: Any, say: Say = unsaid
) -> Lesson:
    """What the model in `source` learns of the teacher in `path`.

    Args:
        say: hears how texts are pooled where the model does not say it, and that vocabularies differ.

    Raises:
        UsageError: the teacher's vectors have another width.
        PruneError: a pooling that cannot be used.
    """
    directory = directory_of(path)
    pooling, taught = read_pooling(source, say), read_pooling(directory)
    own, other = pooling.width(model.config.hidden_size), taught.width(teacher.config.hidden_size)
    if own != other:
        raise UsageError(
            f"{path}: the teacher's vectors are {other:,} wide, the model's {own:,}",
            "Name a teacher with vectors of the same width.",
        )
    words = load_tokenizer(directory)
    if words.get_vocab() == tokenizer.get_vocab():
        return Lesson(teacher, pooling, taught, None)
    say(f"{path} has another vocabulary: it reads each text in its own tokens.")
    return Lesson(teacher, pooling, taught, words)


@dataclass(frozen=True)
class TaughtExamples(Examples):
    """Texts in the tokens of two models.

    Attributes:
        own, taught: the model's and the teacher's.
    """

    own: Examples
    taught: Examples

    @property
    def lengths(self) -> Sequence[tuple[int, int]]:
        """See `Examples`."""
        pairs = zip(self.own.lengths, self.taught.lengths, strict=True)
        return [(own[0], taught[0]) for own, taught in pairs]

    def batch(self, rows: Sequence[int]) -> Batch:
        """See `Examples`."""
        own, taught = self.own.batch(rows), self.taught.batch(rows)
        also = {f"{TAUGHT}{name}": value for name, value in taught.inputs.items()}
        return Batch({**own.inputs, **also}, own.labels, own.indices)


class VectorDistance(Objective):
    """Sum over the texts of 1 - cos(v, v') + h MSE, v' being the teacher's vector.

    MSE is the mean over the batch's real tokens of the squared difference of the last hidden states.

    Args:
        options: `hidden` is h, 0 where the teacher reads other tokens.
        lesson: with the teacher.
    """

    def __init__(self, options: LossOptions, lesson: Lesson) -> None:
        super().__init__(options, lesson.teacher)
        self.lesson = lesson

    def __call__(self, model: Any, batch: Mapping[str, Tensor]) -> Tensor:
        """See `Objective`."""
        inputs = {
            name: value for name, value in batch.items() if name != "labels" and not name.startswith(TAUGHT)
        }
        others = {
            name.removeprefix(TAUGHT): value for name, value in batch.items() if name.startswith(TAUGHT)
        }
        others = others or inputs
        own = model(**inputs, output_hidden_states=True)
        vectors = self.lesson.pooling(own.hidden_states[-1], inputs["attention_mask"])
        with torch.no_grad():
            other = self.teacher(**others, output_hidden_states=True)
            targets = self.lesson.taught(other.hidden_states[-1], others["attention_mask"])
        distance = (1 - functional.cosine_similarity(vectors, targets)).sum()
        if self.options.hidden:
            distance = distance + self.options.hidden * hidden_distance(own, other, batch)
        return distance

    def figures(self, loss: float) -> dict[str, float]:
        """See `Objective`."""
        return {"cosine": 1 - loss}
