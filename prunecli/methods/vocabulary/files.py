"""The tokenizer's files with fewer tokens and new ids: pure, from bytes to bytes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from prunecli.errors import CheckpointError, kind_and_reason
from prunecli.methods.vocabulary.ids import Renumbering
from prunecli.methods.vocabulary.segmentation import merge_parts
from prunecli.methods.vocabulary.sentencepiece_model import read_model, without_pieces
from prunecli.tensors.json_files import parsed

SENTENCEPIECE = (".model", ".spm")
"""Endings of the names of SentencePiece models."""

_VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt")

OTHER_FORMS = ("tekken.json", "encoder.json", "vocab.bpe", "dict.txt")
"""Vocabularies in forms that transformers does not read beside the others: left out, as they would be wrong."""


def holds_vocabulary(files: Iterable[str]) -> bool:
    """Whether one of the files named holds a vocabulary; without one, transformers makes up a tokenizer of nothing."""
    return any(name in _VOCABULARIES or name.endswith(SENTENCEPIECE) for name in files)


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
        rewritten = _REWRITERS.get(name)
        if rewritten is not None:
            try:
                contents[name] = rewritten(data, change)
            except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
                raise CheckpointError(
                    f"{name}: damaged ({kind_and_reason(error)})", "Copy the tokenizer's files again."
                ) from error
        elif name.endswith(SENTENCEPIECE):
            try:
                contents[name] = without_pieces(read_model(data), change.dropped)
            except ValueError:
                contents[name] = None
        elif name in OTHER_FORMS or name.endswith(".tiktoken"):
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
        model["merges"] = [merge for merge in model["merges"] if _is_kept(merge_parts(merge), change)]
    for token in value.get("added_tokens") or ():
        token["id"] = change.new(token["id"])
    if value.get("padding"):
        value["padding"]["pad_id"] = change.new(value["padding"]["pad_id"])
    _renumber_processor(value.get("post_processor"), change)
    return _json(value)


def _renumber_processor(processor: Any, change: Renumbering) -> None:
    """New ids in a template, in BERT's and RoBERTa's `sep` and `cls`, and in those that a sequence holds."""
    if not isinstance(processor, dict):
        return
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


def _is_kept(merged: Sequence[str], change: Renumbering) -> bool:
    """Whether the parts of a merge and its result stay."""
    return change.dropped.isdisjoint((*merged, "".join(merged)))


def _ids_json(data: bytes, change: Renumbering) -> bytes:
    return _json(_kept_ids(parsed(data), change))


def _tokenizer_config(data: bytes, change: Renumbering) -> bytes:
    value = parsed(data)
    added = value.get("added_tokens_decoder")
    if not added:
        return data
    value["added_tokens_decoder"] = {str(change.new(int(key))): token for key, token in added.items()}
    return _json(value)


def _merges_text(data: bytes, change: Renumbering) -> bytes:
    lines = data.decode("utf-8").split("\n")
    kept = []
    for number, line in enumerate(lines):
        parts = line.rstrip("\r").split(" ")
        is_merge = len(parts) == 2 and not (number == 0 and line.startswith("#version"))
        if not is_merge or _is_kept(parts, change):
            kept.append(line)
    return "\n".join(kept).encode()


def _vocab_text(data: bytes, change: Renumbering) -> bytes:
    lines = data.decode("utf-8").split("\n")
    if lines and not lines[-1]:
        lines.pop()
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
}
