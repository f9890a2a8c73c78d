"""What each text costs a causal language model, without what evaluate makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prunecli.evaluation.language_model import TextLosses, of_texts
from prunecli.progress import Progress, silent
from prunecli.running.encoding import padding_id
from prunecli.running.losses import measure_losses
from prunecli.running.runner import Runner
from prunecli.running.windows import lm_windows, window_examples


def lm_losses(
    runner: Runner,
    tokenizer: Any,
    texts: Sequence[str],
    batch_tokens: int,
    *,
    context: int | None = None,
    stride: int | None = None,
    progress: Progress = silent,
) -> TextLosses:
    """Of each text, from those of its windows."""
    windows = lm_windows(tokenizer, runner.model, texts, context=context, stride=stride)
    batches = window_examples(windows, padding_id(runner.model, tokenizer)).batches(batch_tokens)
    nats, tokens = measure_losses(runner, batches, len(windows), "reading", progress)
    return TextLosses(of_texts(nats, windows, len(texts)), of_texts(tokens, windows, len(texts)))
