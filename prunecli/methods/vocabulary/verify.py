"""Whether the trimmed tokenizer cuts text as the original does."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from prunecli.errors import CheckpointError
from prunecli.methods.vocabulary.files import SENTENCEPIECE
from prunecli.methods.vocabulary.measure import Text, as_target, batches, is_two_sided
from prunecli.methods.vocabulary.vocabulary import token_ids
from prunecli.progress import Progress, silent
from prunecli.text.tokens import load_tokenizer, tokenized

_REMEDY = "Nothing was written; please report it with the name of the model."


@dataclass(frozen=True)
class Check:
    """What came out.

    Attributes:
        sentences: number of texts that were compared: lines, documents, messages to a chat model, each once.
        changed: number of these texts that hold removed tokens, and so fall into others.
        running_before: tokens of all these texts, special ones included.
        running_after: with the trimmed tokenizer.
    """

    sentences: int
    changed: int
    running_before: int
    running_after: int


def load_trimmed(files: Mapping[str, bytes], config: Mapping[str, Any], where: str) -> Any:
    """The tokenizer that `files` and config.json give, before they are written anywhere else.

    Raises:
        CheckpointError: transformers cannot read it.
    """
    with tempfile.TemporaryDirectory() as directory:
        for name, data in files.items():
            (Path(directory) / name).write_bytes(data)
        (Path(directory) / "config.json").write_text(json.dumps(config), encoding="utf-8")
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
    text: Text,
    where: str,
    progress: Progress = silent,
) -> Check:
    """Compare the original tokenizer with the trimmed one, token by token.

    Every token that stays must have its new id, and every text whose tokens all stay must fall into these tokens.

    Args:
        tokenizers: the original and the trimmed one.
        new_ids: id -> new id.
        text: what to compare them on.
        where: what messages begin with.

    Raises:
        CheckpointError: they differ.
    """
    original, trimmed = tokenizers
    expected = {
        token: new_ids[number] for token, number in token_ids(original, where).items() if number in new_ids
    }
    actual = token_ids(trimmed, where)
    if actual != expected:
        odd = min(token for token in {*actual, *expected} if actual.get(token) != expected.get(token))
        raise CheckpointError(
            f"{where}: the trimmed tokenizer would give {odd!r} the id {actual.get(odd)}, not {expected.get(odd)}",
            _REMEDY,
        )
    changed, running = 0, [0, 0]
    sides = (False, True) if is_two_sided(original) else (False,)
    with progress("comparing tokens", len(text.all) * len(sides), "texts") as advance:
        for as_targets, part in product(sides, batches(text.all)):
            rows = [_encode(tokenizer, part, as_targets) for tokenizer in tokenizers]
            for line, before, after in zip(part, *rows, strict=True):
                ids = [new_ids.get(number) for number in before]
                if None in ids:
                    changed += 1
                elif ids != after:
                    shown = line if len(line) <= 60 else f"{line[:60]}…"
                    raise CheckpointError(
                        f"{where}: the trimmed tokenizer would cut {shown!r} into other tokens", _REMEDY
                    )
                running[0] += len(before)
                running[1] += len(after)
            advance(len(part))
    return Check(len(text.all) * len(sides), changed, *running)


def models_that_differ(
    before: Mapping[str, bytes], after: Mapping[str, bytes | None], texts: Sequence[str]
) -> tuple[str, ...]:
    """Names of the shortened SentencePiece models that cut a text otherwise, though all of its pieces stay."""
    return tuple(
        name
        for name, data in after.items()
        if data is not None and name.endswith(SENTENCEPIECE) and _differs(before[name], data, texts)
    )


def _differs(before: bytes, after: bytes, texts: Sequence[str]) -> bool:
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


def _encode(tokenizer: Any, lines: list[str], target: bool) -> list[list[int]]:
    with as_target(tokenizer) if target else nullcontext():
        rows = tokenized(tokenizer, lines, truncation=False, verbose=False)["input_ids"]
    return [list(row) for row in rows]
