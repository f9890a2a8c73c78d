"""SentencePiece models (`.model`, `.spm`), read and shortened as protocol buffer messages.

Only the pieces are interpreted. All other bytes are copied, so text is normalised as before. (sentencepiece's own
message classes need the protobuf package, which sentencepiece does not install.)
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterator
from itertools import count
from typing import Any, NamedTuple

NORMAL, UNKNOWN = 1, 2
"""Types of pieces."""

UNIGRAM, BPE = 1, 2
"""Types of models."""

_PIECES, _TRAINER, _SELF_TEST = 1, 2, 4
"""Fields of the message. A self-test holds samples and how the whole vocabulary cuts them."""

_MODEL_TYPE = 3
_TEXT, _SCORE, _TYPE = 1, 2, 3


class Piece(NamedTuple):
    """One piece: its text, its score (a log probability, or minus its rank in BPE) and its type."""

    text: str
    score: float
    type: int


def read_model(data: bytes) -> tuple[list[Piece], int]:
    """Return the pieces of a model file by id, and the model's type: UNIGRAM, BPE, or another.

    Raises:
        ValueError, TypeError, AttributeError, LookupError: the file is not a SentencePiece model.
    """
    pieces: list[Piece] = []
    model_type = UNIGRAM
    for number, value, _ in _fields(data):
        if number in (_PIECES, _TRAINER):
            held = {key: content for key, content, _ in _fields(value)}
        if number == _PIECES:
            (score,) = struct.unpack("<f", held.get(_SCORE, bytes(4)))
            pieces.append(Piece(held.get(_TEXT, b"").decode("utf-8"), score, held.get(_TYPE, NORMAL)))
        elif number == _TRAINER:
            model_type = held.get(_MODEL_TYPE, UNIGRAM)
    if not any(piece.type == UNKNOWN for piece in pieces):
        raise ValueError("no SentencePiece model")
    return pieces, model_type


def without_pieces(data: bytes, dropped: Collection[str]) -> bytes:
    """Remove the normal pieces among `dropped` from a model file; the others keep their order and scores.

    Raises:
        ValueError, TypeError, AttributeError, LookupError: the file is not a SentencePiece model.
    """
    gone = [piece.type == NORMAL and piece.text in dropped for piece in read_model(data)[0]]
    if not any(gone):
        return data
    places = count()
    return b"".join(
        field
        for number, _, field in _fields(data)
        if number != _SELF_TEST and not (number == _PIECES and gone[next(places)])
    )


def _fields(data: bytes) -> Iterator[tuple[int, Any, bytes]]:
    """Yield the fields of a message: number, value (an int or bytes), and the bytes of the whole field."""
    at = 0
    while at < len(data):
        start = at
        tag, at = _varint(data, at)
        number, wire = tag >> 3, tag & 7
        size, at = ({1: 8, 5: 4}[wire], at) if wire in (1, 5) else _varint(data, at)
        value: int | bytes = size
        if wire:
            value, at = data[at : at + size], at + size
        if at > len(data) or number == 0 or wire not in (0, 1, 2, 5):
            raise ValueError("damaged")
        yield number, value, data[start:at]


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the number that begins at `at`, and where it ends."""
    value = 0
    for shift in range(0, 70, 7):
        byte, at = data[at], at + 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError("damaged")
