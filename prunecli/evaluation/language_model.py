"""How well a language model predicts text: perplexity, bits per byte; the loss of hidden tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from prunecli.progress import Progress, silent
from prunecli.running.losses import measure_losses
from prunecli.running.masking import mlm_examples
from prunecli.running.runner import Runner
from prunecli.running.windows import Window

Number = TypeVar("Number", np.float64, np.int64)


@dataclass(frozen=True)
class TextLosses:
    """What each text costs.

    Attributes:
        nats: `[texts]` float64: sum of -log p over its counted tokens.
        tokens: `[texts]` int64: how many those are; 0 for a text in which there is nothing to predict.
    """

    nats: NDArray[np.float64]
    tokens: NDArray[np.int64]

    @property
    def loss(self) -> float:
        """Mean of -log p over all counted tokens, in nats."""
        return float(self.nats.sum() / self.tokens.sum())


def of_texts(values: NDArray[Number], windows: Sequence[Window], count: int) -> NDArray[Number]:
    """Sums `[count, …]` over the windows of each text of `values` `[windows, …]`, in their type."""
    sums = np.zeros((count, *values.shape[1:]), values.dtype)
    np.add.at(sums, np.array([window.text for window in windows]), values)
    return sums


def mlm_losses(
    runner: Runner,
    tokenizer: Any,
    texts: Sequence[str],
    batch_tokens: int,
    *,
    context: int | None = None,
    seed: int = 0,
    what: str = "reading",
    progress: Progress = silent,
) -> TextLosses:
    """Losses of a masked language model on the tokens that `mlm_examples` hides.

    Args:
        context, seed: see `mlm_examples`.
        what: is done, for the progress.

    Raises:
        PruneError: as `mlm_examples` and `runner`; a loss that is not finite.
    """
    examples = mlm_examples(tokenizer, runner.model, texts, context=context, seed=seed)
    return TextLosses(*measure_losses(runner, examples.batches(batch_tokens), len(texts), what, progress))


def perplexity(loss: float) -> float:
    """`exp(loss)`, the loss in nats; bounded, so that it stays a number."""
    return math.exp(min(loss, 700.0))


def bits_per(losses: TextLosses, texts: Sequence[str], measure: Callable[[str], int]) -> float:
    """`sum nats / (ln 2 * sum sizes)` over the texts that have a counted token.

    Args:
        measure: a text's size: `utf8_bytes` or `len`. Unlike perplexity, the result compares models of different
            tokenizers.
    """
    size = sum(measure(text) for text, tokens in zip(texts, losses.tokens, strict=True) if tokens)
    return float(losses.nats.sum() / (math.log(2) * size))


def utf8_bytes(text: str) -> int:
    """Bytes of a text in UTF-8."""
    return len(text.encode())
