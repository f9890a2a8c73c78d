"""The tokenizer's files and the configs with fewer tokens and new ids: pure, from bytes to bytes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prunecli.errors import CheckpointError, UsageError, kind_and_reason
from prunecli.methods.vocabulary.sentencepiece_model import read_model, without_pieces
from prunecli.methods.vocabulary.tokenizer import merge_parts
from prunecli.model.structure import KEY
from prunecli.tensors.json_files import parsed

GENERATION = "generation_config.json"
VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt")
SENTENCEPIECE = (".model", ".spm")
"""Endings of the names of SentencePiece models."""

_OTHER_FORMS = ("tekken.json", "encoder.json", "vocab.bpe", "dict.txt")
"""Vocabularies in forms that transformers does not read beside the others: left out, as they would be wrong."""

_NEEDED = ("_token_id", "_token_ids", "forced_decoder_ids", "force_words_ids")
"""Endings of keys of ids that generation puts out; those of `forced_decoder_ids` come after their place: [[1, 250]]."""
_FORBIDDEN = ("suppress_tokens", "begin_suppress_tokens", "bad_words_ids")
"""Lists of ids that generation must not put out, alone or as sequences: what is gone needs no ban."""
_BIASES = "sequence_bias"
"""[[[ids], bias], …]."""
_NOT_ENTERED = (KEY, "id2label", "label2id", "auto_map")

_DAMAGE = (ValueError, KeyError, TypeError, AttributeError, IndexError)


@dataclass(frozen=True)
class Renumbering:
    """Which tokens stay, under which ids.

    Attributes:
        new_ids: id -> new id, of those that stay.
        dropped: the tokens that go, where the tokenizer has one for the id.
        size: ids before.
    """

    new_ids: Mapping[int, int]
    dropped: frozenset[str]
    size: int

    def new(self, number: int) -> int:
        """The new id of a token that must stay.

        Raises:
            UsageError: it would go.
        """
        if number not in self.new_ids:
            raise UsageError(
                f"The token of id {number} is special, and would go.",
                "Keep every special and added token, and those that the configs name.",
            )
        return self.new_ids[number]


def tokenizer_files(files: Mapping[str, bytes], change: Renumbering) -> dict[str, bytes | None]:
    """The files that differ, by name; None: it has to be left out.

    Args:
        files: name -> content of those of the checkpoint; the ones that hold no tokens are passed over.
        change: what goes.

    Raises:
        CheckpointError: a damaged file.
        UsageError: a special or added token would go.
    """
    contents: dict[str, bytes | None] = {}
    for name, data in files.items():
        if name in _REWRITERS:
            try:
                contents[name] = _REWRITERS[name](data, change)
            except _DAMAGE as error:
                raise CheckpointError(
                    f"{name}: damaged ({kind_and_reason(error)})", "Copy the tokenizer's files again."
                ) from error
        elif name.endswith(SENTENCEPIECE):
            try:
                contents[name] = without_pieces(read_model(data), change.dropped)
            except _DAMAGE:
                contents[name] = None
        elif name in _OTHER_FORMS or name.endswith(".tiktoken"):
            contents[name] = None
    return {name: data for name, data in contents.items() if data != files[name]}


def _tokenizer_json(data: bytes, change: Renumbering) -> bytes:
    value = parsed(data)
    model = value["model"]
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = _kept_ids(vocab, change)
    else:
        model["vocab"] = [piece for piece in vocab if piece[0] not in change.dropped]
        if model.get("unk_id") is not None:
            model["unk_id"] = change.new(model["unk_id"])
    if "merges" in model:
        model["merges"] = [merge for merge in model["merges"] if _is_kept_merge(merge_parts(merge), change)]
    for token in value.get("added_tokens") or ():
        token["id"] = change.new(token["id"])
    if value.get("padding"):
        value["padding"]["pad_id"] = change.new(value["padding"]["pad_id"])
    _renumber_processor(value.get("post_processor") or {}, change)
    return _json(value)


def _renumber_processor(processor: dict[str, Any], change: Renumbering) -> None:
    """New ids in a template, in BERT's and RoBERTa's `sep` and `cls`, and in those that a sequence holds."""
    for token in (processor.get("special_tokens") or {}).values():
        token["ids"] = [change.new(number) for number in token["ids"]]
    for name in ("sep", "cls"):
        if name in processor:
            text, number = processor[name]
            processor[name] = [text, change.new(number)]
    for part in processor.get("processors") or ():
        _renumber_processor(part, change)


def _kept_ids(vocab: Mapping[str, int], change: Renumbering) -> dict[str, int]:
    return {token: change.new(number) for token, number in vocab.items() if token not in change.dropped}


def _is_kept_merge(parts: Sequence[str], change: Renumbering) -> bool:
    """Whether the parts of a merge and its result stay."""
    return change.dropped.isdisjoint((*parts, "".join(parts)))


def _ids_json(data: bytes, change: Renumbering) -> bytes:
    return _json(_kept_ids(parsed(data), change))


def _tokenizer_config(data: bytes, change: Renumbering) -> bytes:
    value = parsed(data)
    added = value.get("added_tokens_decoder")
    if not added:
        return data
    value["added_tokens_decoder"] = {str(change.new(int(key))): token for key, token in added.items()}
    return _json(value)


def _generation_config(data: bytes, change: Renumbering) -> bytes:
    value = parsed(data)
    patched = renumbered(value, change)
    return data if patched == value else _json(patched)


def _merges_text(data: bytes, change: Renumbering) -> bytes:
    lines = data.decode("utf-8").split("\n")
    kept = lines[:1] if lines[0].startswith("#version") else []
    for line in lines[len(kept) :]:
        parts = line.rstrip("\r").split(" ")
        if len(parts) != 2 or _is_kept_merge(parts, change):
            kept.append(line)
    return "\n".join(kept).encode()


def _vocab_text(data: bytes, change: Renumbering) -> bytes:
    lines = data.decode("utf-8").removesuffix("\n").split("\n")
    return "".join(f"{line}\n" for number, line in enumerate(lines) if number in change.new_ids).encode()


def _json(value: Any) -> bytes:
    return (json.dumps(value, ensure_ascii=False, indent=2) + "\n").encode()


_REWRITERS: dict[str, Callable[[bytes, Renumbering], bytes]] = {
    "tokenizer.json": _tokenizer_json,
    "tokenizer_config.json": _tokenizer_config,
    "added_tokens.json": _ids_json,
    "vocab.json": _ids_json,
    "merges.txt": _merges_text,
    "vocab.txt": _vocab_text,
    GENERATION: _generation_config,
}


def named_ids(document: Mapping[str, Any]) -> Iterator[int]:
    """The ids that a config needs: `pad_token_id`, `forced_bos_token_id`, `forced_decoder_ids` and their like."""
    for key, value in document.items():
        if key.endswith(_NEEDED):
            yield from _numbers([step[1:] for step in value] if _is_placed(key, value) else value)
        elif isinstance(value, Mapping) and key not in _NOT_ENTERED:
            yield from named_ids(value)


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
            result[key] = [_mapped(item, change) for item in value if _is_kept(item, change)] or None
        elif key == _BIASES and isinstance(value, list):
            pairs = [[_mapped(ids, change), bias] for ids, bias in value if _is_kept(ids, change)]
            result[key] = pairs or None
        elif _is_placed(key, value):
            result[key] = [[step[0], *_mapped(step[1:], change)] for step in value]
        elif key.endswith(_NEEDED):
            result[key] = _mapped(value, change)
        elif isinstance(value, Mapping) and key not in _NOT_ENTERED:
            result[key] = renumbered(value, change)
        else:
            result[key] = value
    return result


def _is_placed(key: str, value: Any) -> bool:
    return key == "forced_decoder_ids" and isinstance(value, list)


def _numbers(value: Any) -> Iterator[int]:
    if type(value) is int:
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _numbers(item)


def _is_kept(value: Any, change: Renumbering) -> bool:
    return all(number in change.new_ids or not 0 <= number < change.size for number in _numbers(value))


def _mapped(value: Any, change: Renumbering) -> Any:
    if type(value) is int:
        return change.new(value) if 0 <= value < change.size else value
    return [_mapped(item, change) for item in value] if isinstance(value, list) else value
