"""A checkpoint's tokenizer: its tokens, how it cuts words, and which further tokens the kept ones need.

A text falls into the same tokens as before if what led to them is still there, and nothing new can win:

- BPE (1508.07909) merges the pair of lowest rank first. Merges are kept whose parts and result are kept; with every
  token on the way from characters to the seen tokens, each step finds the pair that it found before.
- Unigram (1804.10959) takes the path of the highest sum of scores. Fewer pieces are fewer paths, among which the best
  one stays the best. An unknown character costs 10 more than the least likely piece, which is why that one stays.
- WordPiece and whole words take the longest token, or the word: that one is kept.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from prunecli.errors import UnsupportedModelError
from prunecli.tensors.json_files import parsed

_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")

NORMAL, UNKNOWN = 1, 2
"""Types of pieces."""

UNIGRAM, BPE = 1, 2
"""Types of models."""

_PIECES, _TRAINER, _SELF_TEST = 1, 2, 4
"""Fields of the message. A self-test holds samples and how the whole vocabulary cuts them."""

_MODEL_TYPE = 3
_TEXT, _SCORE, _TYPE = 1, 2, 3

Rank = Callable[[str, str], "float | None"]
"""The rank of the merge of two neighbours, the lowest first; None where they do not merge."""


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer's tokens, and what its model needs to cut text into them.

    Attributes:
        always: tokens that stay whatever the text: single characters, bytes, the scores' extremes.
        ranks: ranks of merges of BPE, one function for each model.
        ids: token -> id.
        special: special and added tokens, language codes: none of them may go.
    """

    always: frozenset[str]
    ranks: tuple[Rank, ...] = ()
    ids: Mapping[str, int] = field(default_factory=dict)
    special: frozenset[str] = frozenset()

    def closure(self, tokens: Iterable[str]) -> set[str]:
        """Return `tokens` and every token that is merged on the way to one of them."""
        reached = set(tokens)
        for rank in self.ranks:
            for token in list(reached):
                reached.update(products(token, rank))
        return reached


def read_vocabulary(tokenizer: Any) -> Vocabulary:
    """The vocabulary of a tokenizer of transformers.

    Args:
        tokenizer: one of the `tokenizers` library, or one that runs SentencePiece (Marian, M2M-100).

    Raises:
        UnsupportedModelError: a tokenizer of another kind.
    """
    ids = token_ids(tokenizer)
    if is_fast(tokenizer):
        found = of_backend(tokenizer.backend_tokenizer)
    else:
        found = of_sentencepiece([path.read_bytes() for path in _models(tokenizer)], ids)
    codes = (*_codes(tokenizer), *getattr(tokenizer, "supported_language_codes", ()))
    special = {str(token) for token in (*tokenizer.get_added_vocab(), *tokenizer.all_special_tokens, *codes)}
    return replace(found, ids=ids, special=frozenset(special & ids.keys()))


def token_ids(tokenizer: Any) -> dict[str, int]:
    """Token -> id, language codes included.

    Raises:
        UnsupportedModelError: a tokenizer of another kind than `read_vocabulary` knows.
    """
    if is_fast(tokenizer):
        return {str(token): int(number) for token, number in tokenizer.get_vocab().items()}
    encoder = getattr(tokenizer, "encoder", None)
    if (
        not isinstance(encoder, dict)
        or not _models(tokenizer)
        or getattr(tokenizer, "separate_vocabs", False)
    ):
        raise UnsupportedModelError(
            f"its tokenizer is a {type(tokenizer).__name__}, which trim-vocabulary does not know",
            "A tokenizer.json, or the files of a Marian or M2M-100 tokenizer, are supported.",
        )
    return {**encoder, **tokenizer.get_added_vocab(), **_codes(tokenizer)}


def is_fast(tokenizer: Any) -> bool:
    """Whether the `tokenizers` library cuts the text."""
    return bool(getattr(tokenizer, "is_fast", False))


def _codes(tokenizer: Any) -> dict[str, int]:
    """The language codes of M2M-100, which come after its vocab.json."""
    return dict(getattr(tokenizer, "lang_token_to_id", {}))


def _models(tokenizer: Any) -> list[Path]:
    """The SentencePiece models that a slow tokenizer runs."""
    found = getattr(tokenizer, "spm_files", None) or [getattr(tokenizer, "spm_file", None)]
    return [Path(path) for path in found if path is not None]


def products(token: str, rank: Rank) -> list[str]:
    """Return the tokens that are merged from characters up to `token`, `token` last; [] if no merges lead there.

    Merges inside of a token do not depend on what stands around it: one across its border would have prevented it.
    """
    symbols = list(token)
    merged = []
    while ranks := [
        (value, index) for index, pair in enumerate(pairwise(symbols)) if (value := rank(*pair)) is not None
    ]:
        _, index = min(ranks)
        merged.append(symbols[index] + symbols[index + 1])
        symbols[index : index + 2] = merged[-1:]
    return merged if len(symbols) == 1 else []


def of_backend(backend: Any) -> Vocabulary:
    """Read the vocabulary of a tokenizer of the `tokenizers` library, without ids and special tokens.

    Raises:
        UnsupportedModelError: another kind of model, or of BPE.
    """
    model = parsed(backend.to_str())["model"]
    kind = model.get("type")
    if kind == "BPE":
        for key in ("continuing_subword_prefix", "end_of_word_suffix"):
            if model.get(key):
                raise UnsupportedModelError(
                    f'its BPE tokenizer has a "{key}", which trim-vocabulary does not know',
                    "BPE without one, Unigram and WordPiece are supported.",
                )
        ranks = {tuple(merge_parts(merge)): index for index, merge in enumerate(model["merges"])}
        return Vocabulary(_always(model["vocab"]), (lambda left, right: ranks.get((left, right)),))
    if kind == "Unigram":
        pieces = [(str(text), float(score)) for text, score in model["vocab"]]
        if len(dict(pieces)) != len(pieces):
            raise UnsupportedModelError("its Unigram tokenizer holds a piece twice")
        return Vocabulary(_always(dict(pieces)) | _extremes(pieces))
    if kind in ("WordPiece", "WordLevel"):
        return Vocabulary(_always(model["vocab"], model.get("continuing_subword_prefix", "")))
    raise UnsupportedModelError(
        f'its tokenizer is of the kind "{kind}", which trim-vocabulary does not know',
        "BPE, Unigram, WordPiece and WordLevel are supported.",
    )


def of_sentencepiece(models: Iterable[bytes], tokens: Iterable[str]) -> Vocabulary:
    """Read the vocabulary of a tokenizer that runs SentencePiece models and has a vocabulary of its own.

    Raises:
        UnsupportedModelError: a model that is neither Unigram nor BPE.
    """
    always, ranks = _always(tokens), []
    for data in models:
        found, model_type = read_model(data)
        pieces = [(piece.text, piece.score) for piece in found if piece.type == NORMAL]
        if model_type == BPE:
            ranks.append(_score_rank(dict(pieces)))
        elif model_type != UNIGRAM:
            raise UnsupportedModelError(
                "a SentencePiece model of words or characters, which trim-vocabulary does not know",
                "BPE and Unigram are supported.",
            )
        always |= _always(dict(pieces)) | _extremes(pieces)
    return Vocabulary(always, tuple(ranks))


def merge_parts(merge: Any) -> list[str]:
    """The two parts of a merge, written as a list or, in older files, as "left right"."""
    return merge.split(" ", 1) if isinstance(merge, str) else list(merge)


def _score_rank(scores: Mapping[str, float]) -> Rank:
    """Return ranks of merges: SentencePiece merges the neighbours whose union has the highest score."""
    return lambda left, right: -scores[left + right] if left + right in scores else None


def _always(tokens: Iterable[str], prefix: str = "") -> frozenset[str]:
    return frozenset(
        token
        for token in tokens
        if 1 in (len(token), len(token.removeprefix(prefix))) or _BYTE.fullmatch(token)
    )


def _extremes(pieces: Sequence[tuple[str, float]]) -> frozenset[str]:
    return frozenset(end(pieces, key=itemgetter(1))[0] for end in (min, max))


# SentencePiece models (`.model`, `.spm`) are protocol buffer messages. Only the pieces are interpreted: all other bytes
# are copied, so text is normalised as before. (sentencepiece's own message classes need the protobuf package, which
# sentencepiece does not install.)


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
    pieces = []
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
