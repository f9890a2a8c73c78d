"""Texts of any length for causal language models: windows of the context in which each token is predicted once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from prunecli.errors import DataError, UsageError
from prunecli.evaluation.losses import IGNORED, Batch, encoded, padding_id, require_task, window_length
from prunecli.text.batching import length_bucketed, pad


@dataclass(frozen=True)
class Window:
    """A stretch of a text that fits the model's context.

    Attributes:
        text: number of the text.
        ids: its tokens.
        counted: so many of the last of them are predicted; the others were, by earlier windows, or start the text.
    """

    text: int
    ids: tuple[int, ...]
    counted: int


def lm_windows(
    tokenizer: Any,
    model: Any,
    texts: Sequence[str],
    *,
    context: int | None = None,
    stride: int | None = None,
) -> list[Window]:
    """Cut texts to windows in which every token is predicted once.

    The first token is predicted from the tokenizer's start token, or its end token where it has none; with neither it
    is not counted. A window begins `stride` tokens after the one before it. By default windows overlap by the one
    token from which the first new one is predicted, so that each predicts context - 1 tokens; with a smaller `stride`
    a counted token that is not in the first window is predicted from context - stride tokens or more.

    Args:
        context: tokens of a window at most; default: see `window_length`.
        stride: default: context - 1.

    Raises:
        UnsupportedModelError: not a causal language model.
        UsageError: the model has fewer positions than `context`; `stride` is not from 1 to context - 1.
        DataError: there is no token to predict.
    """
    require_task(model, "lm")
    length = window_length(model, tokenizer, context)
    step = length - 1 if stride is None else stride
    if not 1 <= step < length:
        raise UsageError(
            f"--stride {step}: a window has {length:,} tokens",
            "Windows must overlap: a stride is from 1 to the window's tokens - 1.",
        )
    windows = []
    for number, ids in enumerate(encoded(tokenizer, texts)):
        windows += _windows(number, started(tokenizer, ids), length, step)
    if not windows:
        raise DataError("the text has no token to predict")
    return windows


def started(tokenizer: Any, ids: list[int]) -> list[int]:
    """Tokens behind the one that a text's first token is predicted from, where the tokenizer has one."""
    start = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    return ids if start is None or ids[:1] == [start] else [start, *ids]


def _windows(text: int, ids: Sequence[int], length: int, step: int) -> list[Window]:
    made, done = [], 1  # nothing comes before the first token
    for begin in range(0, len(ids), step):
        end = min(begin + length, len(ids))
        if end > done:
            made.append(Window(text, tuple(ids[begin:end]), end - done))
            done = end
    return made


def window_batches(windows: Sequence[Window], pad_id: int, batch_tokens: int) -> list[Batch]:
    """Batches of windows; `indices` count the windows."""
    batches = []
    for rows in length_bucketed([len(window.ids) for window in windows], batch_tokens):
        ids, mask = pad([windows[i].ids for i in rows], pad_id)
        labels, _ = pad(
            [
                [IGNORED] * (len(windows[i].ids) - windows[i].counted)
                + list(windows[i].ids[-windows[i].counted :])
                for i in rows
            ],
            IGNORED,
        )
        batches.append(Batch({"input_ids": ids, "attention_mask": mask}, labels, tuple(rows)))
    return batches


def lm_batches(
    tokenizer: Any, model: Any, texts: Sequence[str], batch_tokens: int, *, context: int | None = None
) -> list[Batch]:
    """`lm_windows` in batches: an example is a window, which is a whole text where that fits the context."""
    windows = lm_windows(tokenizer, model, texts, context=context)
    return window_batches(windows, padding_id(model, tokenizer), batch_tokens)
