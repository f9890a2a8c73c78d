"""The tokenizer's files and the configs with fewer tokens and new ids: pure, from bytes to bytes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from prunecli.errors import CheckpointError, UsageError, kind_and_reason
from prunecli.methods.vocabulary.tokenizer import merge_parts, without_pieces
from prunecli.model.structure import KEY
from prunecli.tensors.json_files import GENERATION, parsed

VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt")
SENTENCEPIECE = (".model", ".spm")
"""Endings of the names of SentencePiece models."""

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
_NOT_ENTERED = (KEY, "id2label", "label2id", "auto_map")


@dataclass(frozen=True)
class Renumbering:
    """The tokens to keep, and their new ids.

    Attributes:
        new_ids: id -> new id, of the tokens to keep.
        dropped: the tokens to remove.
        size: number of ids before.
    """

    new_ids: Mapping[int, int]
    dropped: frozenset[str]
    size: int

    @classmethod
    def of(cls, kept: Iterable[int], tokens: Mapping[str, int], size: int) -> Renumbering:
        """Give each kept token its place among the kept ones as its new id; `tokens`: token -> id."""
        new_ids = {old: new for new, old in enumerate(kept)}
        gone = frozenset(token for token, number in tokens.items() if number not in new_ids)
        return cls(new_ids, gone, size)

    def new(self, number: int) -> int:
        """The new id of a token that must stay; a number outside of the vocabulary is no token's id and stays (-1).

        Raises:
            UsageError: the token would go.
        """
        if number not in self.new_ids and 0 <= number < self.size:
            raise UsageError(
                f"The token of id {number} is special, and would be removed.",
                "Keep every special and added token, and those that the configs name.",
            )
        return self.new_ids.get(number, number)

    def mapped(self, value: Any) -> Any:
        """The value with new ids in the place of all whole numbers in it.

        Raises:
            UsageError: a token would go.
        """
        if type(value) is int:
            return self.new(value)
        if isinstance(value, Mapping):
            return {key: self.mapped(item) for key, item in value.items()}
        return [self.mapped(item) for item in value] if isinstance(value, list) else value

    def surviving(self, items: Iterable[Any]) -> list[Any]:
        """Return `items` whose tokens all stay, with new ids."""
        found = []
        for item in items:
            with suppress(UsageError):
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


def tokenizer_files(files: Mapping[str, bytes], change: Renumbering) -> dict[str, bytes | None]:
    """Return the files that differ, by name. None: the file has to be left out.

    Args:
        files: name -> content of the checkpoint's files; files without tokens are passed over.
        change: the tokens to remove, and the new ids.

    Raises:
        CheckpointError: a damaged file.
        UsageError: a special or added token would go.
    """
    contents: dict[str, bytes | None] = {}
    for name, data in files.items():
        try:
            if name in _DOCUMENTS:
                value = parsed(data)
                made = _DOCUMENTS[name](value, change)
                if made != value or not name.endswith("_config.json"):
                    contents[name] = (json.dumps(made, ensure_ascii=False, indent=2) + "\n").encode()
            elif name == "merges.txt":
                lines = data.decode().split("\n")
                first = int(lines[0].startswith("#version"))
                pairs = [line.rstrip("\r").split(" ") for line in lines]
                kept = [
                    line
                    for line, parts in zip(lines[first:], pairs[first:], strict=True)
                    if len(parts) != 2 or _is_kept_merge(parts, change)
                ]
                contents[name] = "\n".join([*lines[:first], *kept]).encode()
            elif name == "vocab.txt":
                lines = data.decode().removesuffix("\n").split("\n")
                words = (f"{line}\n" for number, line in enumerate(lines) if number in change.new_ids)
                contents[name] = "".join(words).encode()
            elif name.endswith(SENTENCEPIECE):
                contents[name] = without_pieces(data, change.dropped)
            elif name in _OTHER_FORMS or name.endswith(".tiktoken"):
                contents[name] = None
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            if not name.endswith(SENTENCEPIECE):
                reason = kind_and_reason(error)
                raise CheckpointError(
                    f"{name}: damaged ({reason})", "Copy the tokenizer's files again."
                ) from error
            contents[name] = None
    return {name: data for name, data in contents.items() if data != files[name]}


def _tokenizer_json(value: dict[str, Any], change: Renumbering) -> dict[str, Any]:
    model = dict(value["model"])
    if isinstance(model["vocab"], dict):
        model["vocab"] = _kept_ids(model["vocab"], change)
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


def _kept_ids(vocab: Mapping[str, int], change: Renumbering) -> dict[str, int]:
    return {token: change.new(number) for token, number in vocab.items() if token not in change.dropped}


def _is_kept_merge(parts: Sequence[str], change: Renumbering) -> bool:
    """Whether the parts of a merge and its result stay."""
    return change.dropped.isdisjoint((*parts, "".join(parts)))


def _tokenizer_config(value: dict[str, Any], change: Renumbering) -> dict[str, Any]:
    key = "added_tokens_decoder"
    added = value.get(key)
    return {**value, key: {str(change.new(int(n))): token for n, token in added.items()}} if added else value


def named_ids(document: Mapping[str, Any]) -> set[int]:
    """The ids that a config needs: `pad_token_id`, `forced_bos_token_id` and their like."""
    noting = Noting({}, frozenset(), 0)
    renumbered(document, noting)
    return noting.needed


def renumbered(document: Mapping[str, Any], change: Renumbering) -> dict[str, Any]:
    """The config with new ids; bans and biases of tokens that are gone go with them.

    Args:
        document: config.json or generation_config.json. A number outside of the old vocabulary is no token's id and
            stays (-1 for none).
        change: the new ids.

    Raises:
        UsageError: an id that the config needs would go.
    """
    result: dict[str, Any] = {}
    for key, value in document.items():
        if key in _FORBIDDEN and value:
            # transformers refuses an empty list where it expects sequences.
            result[key] = change.surviving(value) or None
        elif key == _BIASES and isinstance(value, list):
            pairs = [[new, bias] for ids, bias in value for new in change.surviving([ids])]
            result[key] = pairs or None
        elif key.endswith(_NEEDED):
            result[key] = change.mapped(value)
        elif key == _PLACED:
            result[key] = value and [[place, change.mapped(number)] for place, number in value]
        elif isinstance(value, Mapping) and key not in _NOT_ENTERED:
            result[key] = renumbered(value, change)
        else:
            result[key] = value
    return result


_DOCUMENTS: Mapping[str, Callable[[Any, Renumbering], Any]] = {
    "tokenizer.json": _tokenizer_json,
    "tokenizer_config.json": _tokenizer_config,
    "added_tokens.json": _kept_ids,
    "vocab.json": _kept_ids,
    GENERATION: renumbered,
}
"""JSON file -> its content with fewer tokens and new ids."""
