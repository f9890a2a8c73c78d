"""Text for an encoder with a decoder that was trained to restore it: spans are masked, the decoder writes them.

As T5 and Switch Transformers were trained (1910.10683, 3.1.4): 15 % of the tokens, in spans of 3 on average.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, takewhile
from typing import Any

import numpy as np

from prunecli.errors import UnsupportedModelError

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
    """Those of a tokenizer.

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
    """What the encoder reads, and what the decoder is to write; always the same of the same window.

    Args:
        window: token ids; an end at its end is none of the text.
    """
    end = [] if marks.end is None else [marks.end]
    ids = list(window)
    if end and ids[-1:] == end:
        ids.pop()
    if not ids:
        return end or list(marks.sentinels[:1]), end or list(marks.sentinels[:1])
    hidden = max(1, round(MASKED_SHARE * len(ids)))
    shown = len(ids) - hidden
    spans = max(1, min(round(hidden / SPAN), shown, len(marks.sentinels)))
    drawn = np.random.default_rng(zlib.crc32(array("q", ids).tobytes()))
    inputs: list[int] = []
    targets: list[int] = []
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
