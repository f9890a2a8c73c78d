"""`evaluate --task embedding`: vectors of texts, their distance from the first model's, and their use for two tasks."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from prunecli.errors import DataError
from prunecli.evaluation.tasks import MCNEMAR, Measured, ModelTask, outputs_of
from prunecli.modules.pooling import Pooling, read_pooling
from prunecli.progress import Progress, silent
from prunecli.running.encoding import embedding_examples
from prunecli.running.losses import batch_vectors
from prunecli.running.runner import Runner
from prunecli.text.choice import columns
from prunecli.text.parallel import ParallelText, pair_name
from prunecli.text.plain import LabelledText
from prunecli.text.tokens import Tokenizer

Vectors = NDArray[np.float32]

BLOCK = 1 << 24
"""Number of cosines that are held at a time."""


class Embedding(ModelTask):
    """Cosine to the first model's vectors; Spearman's correlation for scored pairs, retrieval for aligned sentences."""

    def prepare(self) -> None:
        """Choose the test: of retrieval, by McNemar's exact test."""
        self.test = (MCNEMAR, "retrieval") if isinstance(self.data.text, ParallelText) else None
        self.first: dict[str, Vectors] = {}

    def run(self, label: str, runner: Runner, tokenizer: Tokenizer) -> Measured:
        """See `ModelTask`."""
        pooling = read_pooling(self.opened[label].path, self.say)
        vectors = {
            name: text_vectors(
                runner,
                tokenizer,
                pooling,
                texts,
                self.options.decoding.batch_tokens,
                context=self.data.context,
                what=f"{label}: {name or 'embedding'}",
                progress=self.progress,
            )
            for name, texts in columns(self.data.text, self.data.pairs).items()
        }
        self.first = self.first or vectors
        scores: dict[str, Any] = {}
        if all(self.first[name].shape == found.shape for name, found in vectors.items()):
            near = np.concatenate([cosines(self.first[name], found) for name, found in vectors.items()])
            scores = {"cosine": float(near.mean()), "cosine_5_percent": float(np.quantile(near, 0.05))}
        text, values = self.data.text, np.zeros(0)
        if isinstance(text, LabelledText):
            from scipy.stats import spearmanr

            scores["spearman"] = float(spearmanr(_similarities(text), cosines(*vectors.values())).statistic)
        elif isinstance(text, ParallelText):
            right = {
                pair_name(*pair): retrieved(*(vectors[name] for name in pair)) for pair in self.data.pairs
            }
            values = np.concatenate(list(right.values()))
            scores["retrieval"] = float(values.mean())
            scores["retrieval_by_pair"] = {name: round(float(own.mean()), 6) for name, own in right.items()}
        scores["width"] = next(iter(vectors.values())).shape[1]
        return Measured(scores, values)


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
        context: tokens that a text is cut to; None: the model's own limit.
        what: text of the progress line.

    Raises:
        UnsupportedModelError: an encoder with a decoder.
        UsageError: the model has fewer positions than `context`.
        DataError: a text without a token, or a vector that is not finite.
    """
    examples = embedding_examples(tokenizer, runner.model, pooling, texts, context)
    forward = partial(batch_vectors, runner.model, pooling)
    line = what, len(texts), "texts"
    vectors = outputs_of(runner, examples.batches(batch_tokens), forward, line, progress)
    if not np.isfinite(vectors).all():
        raise DataError("a vector is not finite", "Choose `dtype=float32`.")
    return vectors


def cosines(first: Vectors, second: Vectors) -> NDArray[np.float64]:
    """`[texts]`: cosine of each row of both; 0 if a row is 0."""
    one, other = (torch.from_numpy(vectors).double() for vectors in (first, second))
    return np.asarray(functional.cosine_similarity(one, other))


def retrieved(sources: Vectors, targets: Vectors) -> NDArray[np.bool_]:
    """`[texts]`: whether the target in the same row has the largest cosine of all targets, and no other equals it."""
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


def _similarities(text: LabelledText) -> NDArray[np.float64]:
    values = []
    for label, line in zip(text.labels, text.lines, strict=True):
        try:
            values.append(float(label))
        except ValueError:
            values.append(np.nan)
        if not np.isfinite(values[-1]):
            raise DataError(
                f"{text.path}, line {line:,}: {label!r} is no similarity", "Give a number, such as 3.8."
            )
    if len(set(values)) < 2:
        raise DataError(f"{text.path}: all pairs are equally similar", "Give pairs of different similarity.")
    return np.array(values)
