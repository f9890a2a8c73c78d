"""Batches of like lengths, so that little is padding; and windows with spans masked, for an encoder with a decoder."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, takewhile
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from prunecli.errors import UnsupportedModelError

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
    sequences: Sequence[Sequence[int] | NDArray[np.int32]], pad_id: int, *, left: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences of ids as one rectangle, padded on the right, or on the left.

    Returns:
        ids `[batch, longest]` int64, and mask `[batch, longest]` int64: 1 for an id, 0 for padding.
    """
    import torch
    from torch.nn.utils.rnn import pad_sequence

    rows = [torch.as_tensor(sequence, dtype=torch.int64) for sequence in sequences]
    side = "left" if left else "right"
    ids = pad_sequence(rows, batch_first=True, padding_value=-1, padding_side=side)
    return ids.masked_fill(ids == -1, pad_id), (ids != -1).long()


MASKED_SHARE = 0.15
SPAN = 3


@dataclass(frozen=True)
class Marks:
    """Tokens that stand for no text.

    Attributes:
        sentinels: each stands for a masked span, the first for the first.
        end: of a text; None: there is none.
    """

    sentinels: tuple[int, ...]
    end: int | None


def marks_of(tokenizer: Any) -> Marks:
    """Return the marks of a tokenizer.

    Raises:
        UnsupportedModelError: it has no sentinels.
    """
    known = tokenizer.get_vocab()
    names = takewhile(known.__contains__, (f"<extra_id_{number}>" for number in count()))
    sentinels = tuple(known[name] for name in names)
    if not sentinels:
        raise UnsupportedModelError(
            "an encoder with a decoder reads text with spans masked, and its tokenizer has no <extra_id_0> to mask by",
            "Choose experts with prune-experts --metric aimer, --keep FILE or --metric random.",
        )
    return Marks(sentinels, tokenizer.eos_token_id)


def masked(window: Sequence[int], marks: Marks) -> tuple[list[int], list[int]]:
    """Return the encoder's input and the decoder's target; a function of the window alone.

    Args:
        window: token ids; an end at its end is none of the text.
    """
    end = [] if marks.end is None else [marks.end]
    ids = list(window)
    if end and ids[-1:] == end:
        ids.pop()
    if not ids:
        alone = end or [*marks.sentinels[:1]]
        return alone, alone
    hidden = max(1, round(MASKED_SHARE * len(ids)))
    shown = len(ids) - hidden
    spans = max(1, min(round(hidden / SPAN), shown, len(marks.sentinels)))
    drawn = np.random.default_rng(zlib.crc32(array("q", ids).tobytes()))
    inputs = []
    targets = []
    place = 0
    parts = _parts(drawn, shown, spans), _parts(drawn, hidden, spans)
    for sentinel, before, length in zip(marks.sentinels[:spans], *parts, strict=True):
        inputs += [*ids[place : place + before], sentinel]
        place += before + length
        targets += [sentinel, *ids[place - length : place]]
    return inputs + end, targets + end


def _parts(drawn: np.random.Generator, total: int, parts: int) -> Iterator[int]:
    """A whole number as a sum of so many, of 1 at least where it suffices, every one as likely as another."""
    cuts = np.sort(drawn.choice(max(total - 1, 0), parts - 1, replace=False)) + 1
    yield from np.diff([0, *cuts, total]).tolist()
