"""Vectors of texts: how far they are from the first model's, and what they are worth at two tasks of their own."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from prunecli.errors import DataError
from prunecli.evaluation.measured import Measured
from prunecli.modules.pooling import Pooling, read_pooling
from prunecli.progress import Progress, Say, silent, unsaid
from prunecli.running.batches import run_forward
from prunecli.running.encoding import embedding_examples
from prunecli.running.examples import Batch
from prunecli.running.runner import Runner
from prunecli.running.vectors import batch_vectors
from prunecli.text.choice import Dataset, columns
from prunecli.text.labelled import LabelledText
from prunecli.text.parallel import ParallelText, pair_name

Vectors = NDArray[np.float32]

BLOCK = 1 << 24
"""Cosines that are held at a time."""


def text_vectors(
    runner: Runner,
    tokenizer: Any,
    pooling: Pooling,
    texts: list[str],
    batch_tokens: int,
    *,
    context: int | None = None,
    what: str = "embedding",
    progress: Progress = silent,
) -> Vectors:
    """The vector of each text, `[texts, width]`.

    Args:
        context: tokens that a text is cut to; None: what the model says of itself.
        what: is done, for the progress.

    Raises:
        UnsupportedModelError: an encoder with a decoder.
        UsageError: the model has fewer positions than `context`.
        DataError: a text without a token, or a vector that is not finite.
    """
    examples = embedding_examples(tokenizer, runner.model, pooling, texts, context)
    found: dict[int, NDArray[np.float32]] = {}

    def finish(batch: Batch, vectors: Tensor) -> int:
        found.update(zip(batch.indices, vectors.cpu().numpy(), strict=True))
        return len(batch.indices)

    forward = partial(batch_vectors, runner.model, pooling)
    run_forward(
        runner, examples.batches(batch_tokens), forward, finish, (what, len(texts), "texts"), progress
    )
    vectors = np.stack([found[number] for number in range(len(texts))])
    if not np.isfinite(vectors).all():
        raise DataError("a vector is not finite", "Choose --dtype float32.")
    return vectors


def cosines(first: Vectors, second: Vectors) -> NDArray[np.float64]:
    """`[texts]`: of each row of one and of the other; 0 where one of them is 0."""
    products = np.einsum("ij,ij->i", first, second, dtype=np.float64)
    lengths = np.linalg.norm(first, axis=1).astype(np.float64) * np.linalg.norm(second, axis=1)
    return np.asarray(np.divide(products, lengths, out=np.zeros_like(products), where=lengths > 0))


def retrieved(sources: Vectors, targets: Vectors) -> NDArray[np.bool_]:
    """`[texts]`: whether of all targets the one in the same row is the nearest by cosine, and no other as near."""
    ones, others = (
        vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), np.finfo(np.float32).tiny)
        for vectors in (sources, targets)
    )
    found = np.zeros(len(ones), bool)
    step = max(1, BLOCK // len(others))
    for start in range(0, len(ones), step):
        near = ones[start : start + step] @ others.T
        rows = np.arange(len(near))
        own = near[rows, start + rows].copy()
        near[rows, start + rows] = -np.inf
        found[start : start + step] = own > near.max(axis=1, initial=-np.inf)
    return found


@dataclass
class EmbeddingModels:
    """Models side by side, the first one's vectors at hand.

    Attributes:
        data: plain text; pairs of texts, their similarity as label; or sentences of several languages.
        batch_tokens: padded tokens of a batch.
        say: hears how texts are pooled where a model does not say it.
    """

    data: Dataset
    batch_tokens: int
    say: Say = unsaid
    _first: dict[str, Vectors] = field(default_factory=dict)

    @property
    def test(self) -> tuple[str, str] | None:
        """The test of significance, and the score that it tests; None: there is none."""
        return ("McNemar, exact", "retrieval") if isinstance(self.data.text, ParallelText) else None

    def measure(
        self, label: str, directory: Path, runner: Runner, tokenizer: Any, progress: Progress
    ) -> Measured:
        """The next model.

        Raises:
            PruneError: a model or text that cannot be used.
        """
        pooling = read_pooling(directory, self.say)
        vectors = {
            name: text_vectors(
                runner,
                tokenizer,
                pooling,
                texts,
                self.batch_tokens,
                context=self.data.context,
                what=f"{label}: {name}" if name else f"{label}: embedding",
                progress=progress,
            )
            for name, texts in columns(self.data.text, self.data.pairs).items()
        }
        self._first = self._first or vectors
        own, right = self._worth(vectors)
        scores: dict[str, Any] = {**self._distance(vectors), **own}
        scores["width"] = next(iter(vectors.values())).shape[1]
        return Measured(scores, right)

    def _distance(self, vectors: dict[str, Vectors]) -> dict[str, float]:
        """From the first model, where its vectors are as wide: mean cosine, and that of the twentieth farthest off."""
        if any(self._first[name].shape != found.shape for name, found in vectors.items()):
            return {}
        near = np.concatenate([cosines(self._first[name], found) for name, found in vectors.items()])
        return {"cosine": float(near.mean()), "cosine_5_percent": float(np.quantile(near, 0.05))}

    def _worth(self, vectors: dict[str, Vectors]) -> tuple[dict[str, Any], NDArray[Any]]:
        """Spearman's correlation with the labels, or the accuracy of retrieval; and what that test is of."""
        text = self.data.text
        if isinstance(text, LabelledText):
            from scipy.stats import spearmanr

            first, second = vectors.values()
            found = spearmanr(_similarities(text), cosines(first, second)).statistic
            return {"spearman": float(found)}, np.zeros(0)
        if not isinstance(text, ParallelText):
            return {}, np.zeros(0)
        right = {pair_name(*pair): retrieved(vectors[pair[0]], vectors[pair[1]]) for pair in self.data.pairs}
        by_pair = {name: round(float(found.mean()), 6) for name, found in right.items()}
        together = np.concatenate(list(right.values()))
        return {"retrieval": float(together.mean()), "retrieval_by_pair": by_pair}, together


def _similarities(text: LabelledText) -> NDArray[np.float64]:
    values = []
    for label, line in zip(text.labels, text.lines, strict=True):
        try:
            value = float(label)
        except ValueError:
            value = np.nan
        if not np.isfinite(value):
            raise DataError(
                f"{text.path}, line {line:,}: {label!r} is no similarity", "Give a number, such as 3.8."
            )
        values.append(value)
    if len(set(values)) < 2:
        raise DataError(f"{text.path}: all pairs are equally similar", "Give pairs of different similarity.")
    return np.array(values)
