"""Which beams of a running beam search still count."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


@contextmanager
def live_beams(model: Any, beams: int, longest: Tensor) -> Iterator[Callable[[], Tensor]]:
    """Follow `model.generate` while the block runs.

    A sentence in a batch goes on being computed until the whole batch is done. Its beams count only as long as it
    would run alone: transformers asks `_beam_search_has_unfinished_sequences` once a step whether any sentence can
    still improve; here the same question is answered for each sentence.

    Args:
        model: has transformers' generation methods.
        beams: beams per sentence.
        longest: `[batch]`, new tokens at most for each sentence.

    Yields:
        A function that returns `[batch * beams]` bool: the rows of the coming step that count.
    """
    stock = model._beam_search_has_unfinished_sequences
    live = torch.ones(len(longest), dtype=torch.bool, device=longest.device)
    step = 0

    def has_unfinished(
        can_improve: Tensor, finished: Tensor, hits: Tensor, early_stopping: bool | str
    ) -> Any:
        nonlocal step
        step += 1
        closed = finished.all(dim=-1) if early_stopping is True else torch.zeros_like(live)
        live.logical_and_(can_improve.reshape(len(live), -1).any(dim=-1) & ~closed & ~hits.all(dim=-1))
        live.logical_and_(step < longest)
        return stock(can_improve, finished, hits, early_stopping) and bool(live.any())

    model._beam_search_has_unfinished_sequences = has_unfinished
    try:
        yield lambda: live.repeat_interleave(beams)
    finally:
        del model._beam_search_has_unfinished_sequences
