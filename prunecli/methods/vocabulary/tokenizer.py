"""A checkpoint's tokenizer: its tokens, how it cuts words, and which further tokens the kept ones need.

A text falls into the same tokens as before if what led to them is still there, and nothing new can win:

- BPE (1508.07909) merges the pair of lowest rank first. Merges are kept whose parts and result are kept; with every
  token on the way from characters to the seen tokens, each step finds the pair that it found before.
- Unigram (1804.10959) takes the path of the highest sum of scores. Fewer pieces are fewer paths, among which the best
  one stays the best. An unknown character costs 10 more than the least likely piece, which is why that one stays.
- WordPiece and whole words take the longest token, or the word: that one is kept.

Files and configs with fewer tokens and new ids are made of the old ones, from bytes to bytes.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count, pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from prunecli.errors import UnsupportedModelError
from prunecli.model.structure import KEY
from prunecli.tensors.json_files import GENERATION, parsed

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
        always, ranks = _always(ids), []
        for path in _models(tokenizer):
            every, model_type = read_model(path.read_bytes())
            pieces = [(piece.text, piece.score) for piece in every if piece.type == NORMAL]
            if model_type == BPE:
                # SentencePiece merges the neighbours whose union has the highest score.
                scores = {text: -score for text, score in pieces}
                ranks.append(lambda left, right, scores=scores: scores.get(left + right))
            elif model_type != UNIGRAM:
                raise UnsupportedModelError(
                    "a SentencePiece model of words or characters, which trim-vocabulary does not know",
                    "BPE and Unigram are supported.",
                )
            always |= _always(dict(pieces)) | _extremes(pieces)
        found = Vocabulary(always, tuple(ranks))
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


def merge_parts(merge: Any) -> list[str]:
    """The two parts of a merge, written as a list or, in older files, as "left right"."""
    return merge.split(" ", 1) if isinstance(merge, str) else list(merge)


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


def has_ids(data: bytes, ids: Mapping[str, int]) -> bool:
    """Whether the normal pieces of a model file have these ids, or all lie as far from them (XLM-R: by one)."""
    pieces = [
        (number, piece.text) for number, piece in enumerate(read_model(data)[0]) if piece.type == NORMAL
    ]
    return len({ids.get(text, 0) - number for number, text in pieces}) == 1


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


_OTHER_FORMS = ("tekken.json", "encoder.json", "vocab.bpe", "dict.txt")
"""Vocabularies in forms that transformers does not read beside the others: left out, as they would be wrong."""

_PARTS = ("added_tokens", "padding", "post_processor")
_IDS = ("id", "ids", "pad_id", "sep", "cls")
"""Parts of tokenizer.json that hold ids, and the keys of ids in them."""

_NEEDED = (
    "_token_id",
    "_token_ids",
    "_token_index",
    "force_words_ids",
    "lang_to_id",
    "task_to_id",
    "text_decoder_lang_to_code_id",
)
"""Endings of keys of ids that generation puts out, or that stand for an image; the last three: name -> id."""
_PLACED = "forced_decoder_ids"
"""[[place, id], …]."""
_FORBIDDEN = ("suppress_tokens", "begin_suppress_tokens", "bad_words_ids")
"""Lists of ids that generation must not put out, alone or as sequences: what is gone needs no ban."""
_BIASES = "sequence_bias"
"""[[[ids], bias], …]."""
_CONFIGS = ("tokenizer_config.json", "processor_config.json", "preprocessor_config.json")
_ADDED = "added_tokens_decoder"
"""Id -> token, in tokenizer_config.json."""
_MAP = "vocabulary_map"
"""Token -> id, of images and of text (Emu3)."""
_TEXTS = "id_to_text"
"""Id -> text, which is spoken (SeamlessM4T v2)."""
_NOT_ENTERED = (KEY, "id2label", "label2id", "auto_map")


@dataclass(frozen=True)
class Renumbering:
    """The tokens to keep, and their new ids.

    Attributes:
        new_ids: id -> new id, of the tokens to keep.
        ids: token -> id, of all.
        size: number of ids before.
    """

    new_ids: Mapping[int, int]
    ids: Mapping[str, int]
    size: int

    @cached_property
    def dropped(self) -> frozenset[str]:
        """The tokens to remove."""
        return frozenset(token for token, number in self.ids.items() if number not in self.new_ids)

    def new(self, number: int) -> int:
        """The new id of a token that stays; a number outside of the vocabulary is no token's id and stays (-1).

        Raises:
            KeyError: the token goes.
        """
        return self.new_ids[number] if 0 <= number < self.size else number

    def mapped(self, value: Any) -> Any:
        """The value with new ids in the place of all whole numbers in it."""
        if type(value) is int:
            return self.new(value)
        if isinstance(value, Mapping):
            return {key: self.mapped(item) for key, item in value.items()}
        return [self.mapped(item) for item in value] if isinstance(value, list) else value

    def surviving(self, items: Iterable[Any]) -> list[Any]:
        """Return `items` whose tokens all stay, with new ids."""
        found = []
        for item in items:
            with suppress(KeyError):
                found.append(self.mapped(item))
        return found


@dataclass(frozen=True)
class Noting(Renumbering):
    """Notes the ids that must stay in the place of renumbering them."""

    needed: set[int] = field(default_factory=set)

    def new(self, number: int) -> int:
        """Note an id."""
        self.needed.add(number)
        return number

    def surviving(self, _items: Iterable[Any]) -> list[Any]:
        """Return nothing: no id of the items must stay."""
        return []


def tokenizer_files(
    files: Mapping[str, bytes], change: Renumbering, *, beside: bool = False
) -> dict[str, bytes | None]:
    """Return the files that differ, by name. None: the file has to be left out.

    Args:
        files: name -> content of the checkpoint's files; files without tokens are passed over.
        change: the tokens to remove, and the new ids.
        beside: a tokenizer.json is read; a SentencePiece model beside it stays where its pieces have the same ids.
    """
    contents: dict[str, bytes | None] = {}
    for name, data in files.items():
        try:
            if rewrite := renumbered if name.endswith("/config.json") else _DOCUMENTS.get(name):
                value = parsed(data)
                made = rewrite(value, change)
                if made != value or not name.endswith("config.json"):
                    contents[name] = (json.dumps(made, ensure_ascii=False, indent=2) + "\n").encode()
            elif name == "merges.txt":
                kept = [
                    line
                    for line in data.decode().split("\n")
                    if line.startswith("#version")
                    or len(parts := line.rstrip("\r").split(" ")) != 2
                    or _is_kept_merge(parts, change)
                ]
                contents[name] = "\n".join(kept).encode()
            elif name == "vocab.txt":
                lines = data.decode().removesuffix("\n").split("\n")
                words = (f"{line}\n" for number, line in enumerate(lines) if number in change.new_ids)
                contents[name] = "".join(words).encode()
            elif name.endswith((".model", ".spm")):
                pieces, _ = read_model(data)
                gone = [piece.type != UNKNOWN and piece.text in change.dropped for piece in pieces]
                places = count()
                made = b"".join(
                    field
                    for number, _, field in _fields(data)
                    if number != _SELF_TEST and not (number == _PIECES and gone[next(places)])
                )
                fits = not beside or has_ids(made, kept_ids(change.ids, change))
                contents[name] = made if fits else None
            elif name in _OTHER_FORMS or ".tiktoken" in name or ".model.v" in name:
                contents[name] = None
        except (ValueError, LookupError, TypeError, AttributeError):
            contents[name] = None  # damaged, and not read: the tokenizer was made
    return {name: data for name, data in contents.items() if data != files[name]}


def _tokenizer_json(value: dict[str, Any], change: Renumbering) -> dict[str, Any]:
    model = dict(value["model"])
    if isinstance(model["vocab"], dict):
        model["vocab"] = kept_ids(model["vocab"], change)
    else:
        model["vocab"] = [piece for piece in model["vocab"] if piece[0] not in change.dropped]
    if "unk_id" in model:
        model["unk_id"] = change.mapped(model["unk_id"])
    if "merges" in model:
        model["merges"] = [merge for merge in model["merges"] if _is_kept_merge(merge_parts(merge), change)]
    parts = {key: _part(value[key], change) for key in _PARTS if key in value}
    return {**value, "model": model, **parts}


def _part(part: Any, change: Renumbering) -> Any:
    """A part of tokenizer.json with new ids: of tokens, in a template, and in BERT's and RoBERTa's `sep` and `cls`."""
    if isinstance(part, list):
        return [_part(item, change) for item in part]
    if not isinstance(part, dict):
        return part
    return {
        key: change.mapped(item) if key in _IDS and not isinstance(item, dict) else _part(item, change)
        for key, item in part.items()
    }


def kept_ids(vocab: Iterable[str], change: Renumbering) -> dict[str, int]:
    """A vocabulary with the tokenizer's ids: those of a file beside tokenizer.json may be older, and are not read."""
    return {token: change.new_ids[n] for token in vocab if (n := change.ids.get(token, -1)) in change.new_ids}


def _is_kept_merge(parts: Sequence[str], change: Renumbering) -> bool:
    """Whether the parts of a merge and its result stay."""
    return change.dropped.isdisjoint((*parts, "".join(parts)))


def named_ids(config: Mapping[str, Any], files: Mapping[str, bytes] = {}) -> set[int]:
    """The ids that a config needs (`pad_token_id`, `forced_bos_token_id` and their like), and the tokenizer's files."""
    noting = Noting({}, {}, 0)
    renumbered(config, noting)
    tokenizer_files(files, noting)
    return noting.needed


def renumbered(document: Mapping[str, Any], change: Renumbering) -> dict[str, Any]:
    """The config with new ids; bans and biases of tokens that are gone go with them.

    Args:
        document: config.json, also of a module, or that of generation, tokenizer or processor. A number outside of the
            old vocabulary is no token's id and stays (-1 for none).
        change: the new ids.
    """
    result: dict[str, Any] = {}
    for key, value in document.items():
        if key in _FORBIDDEN and value:
            # transformers refuses an empty list where it expects sequences.
            result[key] = change.surviving(value) or None
        elif key == _BIASES and isinstance(value, list):
            result[key] = [[new, bias] for ids, bias in value for new in change.surviving([ids])] or None
        elif key.endswith(_NEEDED):
            result[key] = change.mapped(value)
        elif key == _PLACED:
            result[key] = value and [[place, change.mapped(number)] for place, number in value]
        elif key == _ADDED and isinstance(value, Mapping):
            result[key] = {str(change.new(int(number))): token for number, token in value.items()}
        elif key == _MAP and isinstance(value, Mapping):
            result[key] = {
                token: new for token, number in value.items() for new in change.surviving([number])
            }
        elif key == _TEXTS and isinstance(value, Mapping):
            ids = change.new_ids.items()
            result[key] = {str(new): value[str(old)] for old, new in ids if str(old) in value}
        elif isinstance(value, Mapping) and key not in _NOT_ENTERED:
            result[key] = renumbered(value, change)
        else:
            result[key] = value
    return result


_DOCUMENTS: Mapping[str, Callable[[Any, Renumbering], Any]] = {
    "tokenizer.json": _tokenizer_json,
    "added_tokens.json": kept_ids,
    "vocab.json": kept_ids,
    **dict.fromkeys((GENERATION, *_CONFIGS), renumbered),
}
"""JSON file -> its content with fewer tokens and new ids."""
