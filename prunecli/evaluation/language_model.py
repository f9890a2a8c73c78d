"""How well a language model predicts text: perplexity, bits per byte; the loss of hidden tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from prunecli.evaluation.layer_major import Runner, in_memory
from prunecli.running.encoding import padding_id
from prunecli.running.examples import Batch
from prunecli.running.losses import require_finite, token_losses
from prunecli.running.masking import mlm_examples
from prunecli.running.windows import lm_windows, window_examples


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


def lm_losses(
    model: Any,
    tokenizer: Any,
    texts: Sequence[str],
    batch_tokens: int,
    *,
    context: int | None = None,
    stride: int | None = None,
    advance: Callable[[float], None] = lambda _tokens: None,
    run: Runner = in_memory,
) -> TextLosses:
    """Losses of a causal language model; each token is predicted once, in the windows of `lm_windows`.

    Args:
        context, stride: see `lm_windows`.
        advance: called with the tokens of each finished batch, padding left out.
        run: how passes are run: with the whole model in memory, or layer by layer.

    Raises:
        PruneError: as `lm_windows`; a loss that is not finite.
    """
    windows = lm_windows(tokenizer, model, texts, context=context, stride=stride)
    batches = window_examples(windows, padding_id(model, tokenizer)).batches(batch_tokens)
    made = _losses(model, batches, len(windows), advance, run)
    owners = np.array([window.text for window in windows])
    nats, tokens = np.zeros(len(texts)), np.zeros(len(texts), np.int64)
    np.add.at(nats, owners, made.nats)
    np.add.at(tokens, owners, made.tokens)
    return TextLosses(nats, tokens)


def mlm_losses(
    model: Any,
    tokenizer: Any,
    texts: Sequence[str],
    batch_tokens: int,
    *,
    context: int | None = None,
    seed: int = 0,
    advance: Callable[[float], None] = lambda _tokens: None,
    run: Runner = in_memory,
) -> TextLosses:
    """Losses of a masked language model on the tokens that `mlm_examples` hides.

    Raises:
        PruneError: as `mlm_examples`; a loss that is not finite.
    """
    batches = mlm_examples(tokenizer, model, texts, context=context, seed=seed).batches(batch_tokens)
    return _losses(model, batches, len(texts), advance, run)


def _losses(
    model: Any,
    batches: Sequence[Batch],
    examples: int,
    advance: Callable[[float], None],
    run: Runner,
) -> TextLosses:
    nats, tokens = np.zeros(examples), np.zeros(examples, np.int64)

    def finish(number: int, found: tuple[Tensor, Tensor]) -> None:
        (sums, counts), batch = found, batches[number]
        require_finite(sums, batch)
        nats[list(batch.indices)] = sums.double().cpu().numpy()
        tokens[list(batch.indices)] = counts.numpy()
        advance(int(batch.inputs["attention_mask"].sum()))

    run(batches, [partial(token_losses, model, batch) for batch in batches], finish)
    return TextLosses(nats, tokens)


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
