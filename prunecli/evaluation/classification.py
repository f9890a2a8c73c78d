"""What a classifier gets right: accuracy, F1 and Matthews correlation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from prunecli.progress import Progress, silent
from prunecli.running.batches import run_forward
from prunecli.running.encoding import labelled_examples
from prunecli.running.examples import Batch
from prunecli.running.losses import require_finite
from prunecli.running.runner import Runner
from prunecli.text.labelled import LabelledText


@dataclass(frozen=True)
class Predictions:
    """A classifier's choices.

    Attributes:
        chosen: `[examples]` int64: the class of the largest logit, the first of equal ones.
        labels: `[examples]` int64: the right class.
        losses: `[examples]` float64: cross-entropy, in nats.
    """

    chosen: NDArray[np.int64]
    labels: NDArray[np.int64]
    losses: NDArray[np.float64]

    @property
    def right(self) -> NDArray[np.bool_]:
        """`[examples]` bool."""
        return np.asarray(self.chosen == self.labels)


def classify(
    runner: Runner,
    tokenizer: Any,
    text: LabelledText,
    batch_tokens: int,
    *,
    what: str = "classifying",
    progress: Progress = silent,
) -> Predictions:
    """Let a model choose a class for every example.

    Args:
        what: is done, for the progress.

    Raises:
        PruneError: as `labelled_examples` and `runner`; a loss that is not finite.
    """
    chosen, labels = np.zeros(len(text), np.int64), np.zeros(len(text), np.int64)
    losses = np.zeros(len(text))

    def logits_of(batch: Batch) -> Tensor:
        logits: Tensor = runner.model(**batch.arguments(runner.model)).logits
        return logits

    def finish(batch: Batch, logits: Tensor) -> int:
        logits = logits.float().cpu()
        batch_losses = functional.cross_entropy(logits, batch.labels, reduction="none")
        require_finite(batch_losses, batch)
        rows = list(batch.indices)
        chosen[rows] = logits.argmax(dim=1).numpy()
        labels[rows] = batch.labels.numpy()
        losses[rows] = batch_losses.double().numpy()
        return len(rows)

    batches = labelled_examples(tokenizer, runner.model, text).batches(batch_tokens)
    run_forward(runner, batches, logits_of, finish, (what, len(text), "examples"), progress)
    return Predictions(chosen, labels, losses)


def accuracy(predictions: Predictions) -> float:
    """Share of the examples whose class was chosen."""
    return float(predictions.right.mean())


def f1_scores(predictions: Predictions) -> dict[int, float]:
    """`F1 = 2 TP / (2 TP + FP + FN)` of every class that is chosen or right somewhere; their mean is macro F1."""
    scores = {}
    for number in np.union1d(predictions.chosen, predictions.labels).tolist():
        chosen, right = predictions.chosen == number, predictions.labels == number
        scores[int(number)] = float(2 * np.sum(chosen & right) / (np.sum(chosen) + np.sum(right)))
    return scores


def matthews_correlation(predictions: Predictions) -> float:
    """Matthews' correlation of choices and labels, of any number of classes (Gorodkin 2004); CoLA's measure.

    `(s c - sum t_k p_k) / sqrt((s^2 - sum p_k^2) (s^2 - sum t_k^2))`: of s examples c are right, t_k are
    of the class k and p_k called so. 0 where all have one label, or one class is chosen for all.
    """
    size = int(max(predictions.chosen.max(), predictions.labels.max())) + 1
    called = np.bincount(predictions.chosen, minlength=size).astype(np.float64)
    true = np.bincount(predictions.labels, minlength=size).astype(np.float64)
    examples = float(len(predictions.labels))
    covariance = examples * float(predictions.right.sum()) - float(called @ true)
    spreads = (examples**2 - float(called @ called)) * (examples**2 - float(true @ true))
    return float(covariance / np.sqrt(spreads)) if spreads > 0 else 0.0
