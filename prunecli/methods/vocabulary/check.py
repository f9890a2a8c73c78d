"""The trimmed tokenizer is read and compared with the original one before anything is written."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from prunecli.errors import CheckpointError
from prunecli.methods.vocabulary.measure import batches, sides
from prunecli.methods.vocabulary.tokenizer import token_ids
from prunecli.progress import Progress, silent
from prunecli.text.tokens import load_tokenizer, tokenized

_REMEDY = "Nothing was written; please report it with the name of the model."


def load_trimmed(files: Mapping[str, bytes], config: Mapping[str, Any], where: str) -> Any:
    """The tokenizer that `files` and config.json give, before they are written anywhere else.

    Raises:
        CheckpointError: transformers cannot read it.
    """
    with tempfile.TemporaryDirectory() as directory:
        for name, data in {**files, "config.json": json.dumps(config).encode()}.items():
            (Path(directory) / name).write_bytes(data)
        try:
            return load_tokenizer(directory)
        except CheckpointError as error:
            reason = error.message.replace(directory, "it")
            raise CheckpointError(
                f"{where}: the trimmed tokenizer cannot be read: {reason}", _REMEDY
            ) from error


def check_same(
    tokenizers: tuple[Any, Any],
    new_ids: Mapping[int, int],
    texts: Sequence[str],
    where: str,
    progress: Progress = silent,
) -> dict[str, int]:
    """Compare the original tokenizer with the trimmed one, token by token.

    Every token that stays must have its new id, and every text whose tokens all stay must fall into these tokens.

    Args:
        tokenizers: the original and the trimmed one.
        new_ids: id -> new id.
        texts: what to compare them on: lines, documents, messages to a chat model, each once.
        where: what messages begin with.

    Returns:
        `sentences`: number of texts that were compared; `changed`: number of these that hold removed tokens, and so
        fall into others; `running_before`, `running_after`: tokens of all texts by each tokenizer, special ones
        included.

    Raises:
        CheckpointError: they differ.
    """
    original, trimmed = (token_ids(tokenizer, where) for tokenizer in tokenizers)
    expected = {token: new_ids[number] for token, number in original.items() if number in new_ids}
    if trimmed != expected:
        odd = min(token for token in {*trimmed, *expected} if trimmed.get(token) != expected.get(token))
        raise CheckpointError(
            f"{where}: the trimmed tokenizer would give {odd!r} the id {trimmed.get(odd)}, not {expected.get(odd)}",
            _REMEDY,
        )
    targets = sides(tokenizers[0])
    found = {"sentences": len(texts) * len(targets), "changed": 0, "running_before": 0, "running_after": 0}
    with progress("comparing tokens", found["sentences"], "texts") as advance:
        for is_target, part in product(targets, batches(texts)):
            options = {"text_target" if is_target else "text": part, "truncation": False, "verbose": False}
            rows = [tokenized(tokenizer, **options)["input_ids"] for tokenizer in tokenizers]
            for line, before, after in zip(part, *rows, strict=True):
                ids = [new_ids.get(number) for number in before]
                if None in ids:
                    found["changed"] += 1
                elif ids != list(after):
                    shown = line if len(line) <= 60 else f"{line[:60]}…"
                    raise CheckpointError(
                        f"{where}: the trimmed tokenizer would cut {shown!r} into other tokens", _REMEDY
                    )
                found["running_before"] += len(before)
                found["running_after"] += len(after)
            advance(len(part))
    return found


def differs(before: bytes, after: bytes, texts: Sequence[str]) -> bool:
    """Whether a shortened SentencePiece model cuts a text otherwise, though all of its pieces stay."""
    from sentencepiece import SentencePieceProcessor

    try:
        models = [SentencePieceProcessor(model_proto=data) for data in (before, after)]
    except RuntimeError:
        return True
    kept = {models[1].id_to_piece(number) for number in range(models[1].get_piece_size())}
    for part in batches(texts):
        rows = [model.encode(part, out_type=str) for model in models]
        if any(one != other for one, other in zip(*rows, strict=True) if kept.issuperset(one)):
            return True
    return False
