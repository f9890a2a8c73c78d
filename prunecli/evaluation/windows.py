"""Texts of any length for causal language models: windows of the context in which each token is predicted once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from prunecli.data.batching import length_bucketed, pad
from prunecli.errors import DataError, UsageError
from prunecli.evaluation.losses import IGNORED, Batch, context_length, encoded, padding_id, require_task


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
    tokenizer: Any, model: Any, texts: Sequence[str], *, stride: int | None = None
) -> list[Window]:
    """Cut texts to windows of the model's context in which every token is predicted once.

    The first token is predicted from the tokenizer's start token, or its end token where it has none; with neither it
    is not counted. A window begins `stride` tokens after the one before it, so that a counted token that is not in the
    first window is predicted from context - stride tokens or more.

    Args:
        stride: default: half of the context.

    Raises:
        UnsupportedModelError: not a causal language model.
        UsageError: `stride` is not from 1 to context - 1.
        DataError: there is no token to predict.
    """
    require_task(model, "lm")
    context = context_length(model, tokenizer)
    if stride is not None and (stride < 1 or (context is not None and stride >= context)):
        raise UsageError(
            f"--stride {stride}: the model's context has {context} tokens",
            "Windows must overlap: a stride is from 1 to context - 1.",
        )
    start = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    windows = []
    for number, ids in enumerate(encoded(tokenizer, texts)):
        if start is not None and (not ids or ids[0] != start):
            ids = [start, *ids]
        windows += _windows(number, ids, context or max(2, len(ids)), stride)
    if not windows:
        raise DataError("the text has no token to predict")
    return windows


def _windows(text: int, ids: Sequence[int], context: int, stride: int | None) -> list[Window]:
    step = stride or max(1, context // 2)
    made, done = [], 1  # nothing comes before the first token
    for begin in range(0, len(ids), step):
        end = min(begin + context, len(ids))
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
    tokenizer: Any, model: Any, texts: Sequence[str], batch_tokens: int, *, stride: int | None = None
) -> list[Batch]:
    """`lm_windows` in batches: an example is a window, which is a whole text where that fits the context."""
    windows = lm_windows(tokenizer, model, texts, stride=stride)
    return window_batches(windows, padding_id(model, tokenizer), batch_tokens)
