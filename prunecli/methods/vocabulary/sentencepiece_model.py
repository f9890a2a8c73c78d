"""SentencePiece models (`.model`, `.spm`), read and shortened as what they are: one protocol buffer message.

Only the pieces are looked at; every other byte stays as it is, so that normalisation stays the same too.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterator
from dataclasses import dataclass

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Types of pieces."""

UNIGRAM, BPE = 1, 2
"""Types of models."""

_PIECES, _TRAINER, _SELF_TEST = 1, 2, 4
"""Fields of the message; a self-test says what the whole vocabulary makes of samples."""

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
    """What is known of a model file.

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
        ValueError: it is none.
    """
    pieces: list[Piece] = []
    model_type = UNIGRAM
    for number, value, _, _ in _fields(data):
        if number == _PIECES:
            pieces.append(_piece(_message(value)))
        elif number == _TRAINER:
            found = {key: held for key, held, _, _ in _fields(_message(value))}
            kind = found.get(_MODEL_TYPE, UNIGRAM)
            model_type = kind if isinstance(kind, int) else model_type
    if not any(piece.type == UNKNOWN for piece in pieces):
        raise ValueError("no SentencePiece model")
    return SentencePieceModel(data, tuple(pieces), model_type)


def without_pieces(model: SentencePieceModel, dropped: Collection[str]) -> bytes:
    """The file without the normal pieces among `dropped`; the others keep their order and scores."""
    if not any(piece.type == NORMAL and piece.text in dropped for piece in model.pieces):
        return model.data
    kept: list[bytes] = []
    pieces = iter(model.pieces)
    for number, _, start, stop in _fields(model.data):
        if number == _PIECES:
            piece = next(pieces)
            if piece.type == NORMAL and piece.text in dropped:
                continue
        if number != _SELF_TEST:
            kept.append(model.data[start:stop])
    return b"".join(kept)


def _piece(data: bytes) -> Piece:
    text, score, kind = b"", 0.0, NORMAL
    for number, value, _, _ in _fields(data):
        if number == _TEXT:
            text = _message(value)
        elif number == _SCORE and isinstance(value, bytes):
            score = struct.unpack("<f", value)[0]
        elif number == _TYPE and isinstance(value, int):
            kind = value
    return Piece(text.decode("utf-8"), score, kind)


def _message(value: int | bytes) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("a number where text belongs")
    return value


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes, int, int]]:
    """The fields of a message: (number, value, first byte, byte after the last)."""
    at = 0
    while at < len(data):
        start = at
        tag, at = _varint(data, at)
        number, wire = tag >> 3, tag & 7
        value: int | bytes
        if wire == 0:
            value, at = _varint(data, at)
        elif wire in (1, 2, 5):
            size = {1: 8, 5: 4}.get(wire)
            if size is None:
                size, at = _varint(data, at)
            value, at = data[at : at + size], at + size
        else:
            raise ValueError(f"wire type {wire}")
        if at > len(data) or number == 0:
            raise ValueError("cut short")
        yield number, value, start, at


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data) and shift < 70:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
    raise ValueError("cut short")
