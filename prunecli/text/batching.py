"""Batches of like lengths, so that little of a batch is padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def length_bucketed(
    lengths: Sequence[int] | Sequence[tuple[int, int]],
    max_tokens: int,
    max_sentences: int | None = None,
    *,
    equal: bool = False,
) -> list[list[int]]:
    """Cut sentences into batches of like lengths, the longest first; every index appears once.

    The padded size of a batch, sentences x longest, is at most `max_tokens`, except that a sentence longer
    than that has a batch of its own. Lengths of (source, target) are bounded by the larger of the two sides.

    Args:
        lengths: tokens of each sentence, or of its source and its target.
        max_tokens: padded tokens in a batch.
        max_sentences: sentences in a batch, or None for no bound.
        equal: whether a batch holds sentences of one length alone, so that nothing is padded.

    Returns:
        Indices into `lengths`; ties are in index order, so that the result is a function of the arguments.
    """
    sizes = [(length, length) if isinstance(length, int) else length for length in lengths]
    order = sorted(range(len(sizes)), key=lambda i: (-max(sizes[i]), -sizes[i][0], -sizes[i][1], i))
    batches: list[list[int]] = []
    longest = 0
    for index in order:
        # Sorted by the larger side: the first sentence of a batch has its padded length.
        full = batches and (len(batches[-1]) + 1) * longest > max_tokens
        other = batches and equal and sizes[index] != sizes[batches[-1][0]]
        if not batches or full or other or len(batches[-1]) == max_sentences:
            batches.append([])
            longest = max(sizes[index])
        batches[-1].append(index)
    return batches


def pad(
    sequences: Sequence[Sequence[int]], pad_id: int, *, left: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences of ids as one rectangle, padded on the right, or on the left.

    Returns:
        ids `[batch, longest]` int64, and mask `[batch, longest]` int64: 1 for an id, 0 for padding.
    """
    import torch

    longest = max((len(sequence) for sequence in sequences), default=0)
    ids = torch.full((len(sequences), longest), pad_id, dtype=torch.int64)
    mask = torch.zeros((len(sequences), longest), dtype=torch.int64)
    for row, sequence in enumerate(sequences):
        start = longest - len(sequence) if left else 0
        ids[row, start : start + len(sequence)] = torch.tensor(sequence, dtype=torch.int64)
        mask[row, start : start + len(sequence)] = 1
    return ids, mask
