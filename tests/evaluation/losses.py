"""Losses of texts, without the scores that evaluate computes from them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prunecli.running.batches import measure_losses
from prunecli.running.encoding import lm_windows, mlm_examples, padding_id, window_examples
from prunecli.running.layerwise.runner import Runner


@dataclass(frozen=True)
class TextLosses:
    """`[texts]` each: sum of -log p over the counted tokens, and the number of these tokens."""

    nats: NDArray[np.float64]
    tokens: NDArray[np.int64]

    @property
    def loss(self) -> float:
        """Mean loss of all counted tokens."""
        return float(self.nats.sum() / self.tokens.sum())


def lm_losses(runner: Runner, tokenizer: Any, texts: Sequence[str], batch_tokens: int) -> TextLosses:
    """Losses of a causal language model, summed over the windows of each text."""
    windows = lm_windows(tokenizer, runner.model, texts)
    batches = window_examples(windows, padding_id(runner.model, tokenizer)).batches(batch_tokens)
    both = measure_losses(runner, batches, len(windows), "reading")
    owners = [window.text for window in windows]
    return TextLosses(*(np.bincount(owners, values, len(texts)) for values in both))


def mlm_losses(runner: Runner, tokenizer: Any, texts: Sequence[str], batch_tokens: int) -> TextLosses:
    """Losses of a masked language model on hidden tokens."""
    batches = mlm_examples(tokenizer, runner.model, texts).batches(batch_tokens)
    return TextLosses(*measure_losses(runner, batches, len(texts), "reading"))
