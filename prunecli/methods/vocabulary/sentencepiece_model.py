"""SentencePiece models (`.model`, `.spm`), read and shortened as protocol buffer messages.

Only the pieces are interpreted. Every other byte stays the same, and with it the normalisation of text.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

NORMAL, UNKNOWN = 1, 2
"""Types of pieces."""

UNIGRAM, BPE = 1, 2
"""Types of models."""

_PIECES, _TRAINER, _SELF_TEST = 1, 2, 4
"""Fields of the message. A self-test holds samples and how the whole vocabulary cuts them."""

_MODEL_TYPE = 3
_TEXT, _SCORE, _TYPE = 1, 2, 3


@dataclass(frozen=True)
class Piece:
    """One piece: its text, its score (a log probability, or minus its rank in BPE) and its type."""

    text: str
    score: float
    type: int


@dataclass(frozen=True)
class SentencePieceModel:
    """The parts of a model file that trimming needs.

    Attributes:
        data: the file.
        pieces: by id.
        model_type: UNIGRAM, BPE, or another.
    """

    data: bytes
    pieces: tuple[Piece, ...]
    model_type: int


def read_model(data: bytes) -> SentencePieceModel:
    """Read a model file.

    Raises:
        ValueError, TypeError, AttributeError: the file is not a SentencePiece model.
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
    return SentencePieceModel(data, tuple(pieces), model_type)


def without_pieces(model: SentencePieceModel, dropped: Collection[str]) -> bytes:
    """The file without the normal pieces among `dropped`; the others keep their order and scores."""
    gone = [piece.type == NORMAL and piece.text in dropped for piece in model.pieces]
    if not any(gone):
        return model.data
    places = count()
    return b"".join(
        field
        for number, _, field in _fields(model.data)
        if number != _SELF_TEST and not (number == _PIECES and gone[next(places)])
    )


def _fields(data: bytes) -> Iterator[tuple[int, Any, bytes]]:
    """The fields of a message: (number, value, bytes of the whole field). A value is an int or bytes."""
    at = 0
    while at < len(data):
        start = at
        tag, at = _varint(data, at)
        number, wire = tag >> 3, tag & 7
        value: int | bytes
        if wire == 0:
            value, at = _varint(data, at)
        elif wire in (1, 2, 5):
            size, at = _varint(data, at) if wire == 2 else ({1: 8, 5: 4}[wire], at)
            value, at = data[at : at + size], at + size
        else:
            raise ValueError(f"wire type {wire}")
        if at > len(data) or number == 0:
            raise ValueError("cut short")
        yield number, value, data[start:at]


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data) and shift < 70:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
    raise ValueError("cut short")
