"""From a checkpoint, text and options to a plan: which tokens stay, and their tokenizer. Nothing is written."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prunecli.errors import CheckpointError
from prunecli.methods.vocabulary.files import SENTENCEPIECE, holds_vocabulary, tokenizer_files
from prunecli.methods.vocabulary.ids import Renumbering, named_ids, renumbered, with_defaults
from prunecli.methods.vocabulary.measure import Text, as_target, batches, count_tokens, is_two_sided
from prunecli.methods.vocabulary.select import TokenChoice, VocabularyOptions, select_tokens
from prunecli.methods.vocabulary.vocabulary import read_vocabulary, token_ids
from prunecli.model.find_axes import axes_of, vocabulary_size
from prunecli.progress import Progress, silent
from prunecli.selection.selection import Selection
from prunecli.tensors.json_files import parsed
from prunecli.text.choice import Lines
from prunecli.text.tokens import load_tokenizer, tokenized

if TYPE_CHECKING:
    from prunecli.model.checkpoint import Checkpoint

GENERATION = "generation_config.json"
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


@dataclass(frozen=True, kw_only=True)
class VocabularyPlan(Selection):
    """Which tokens stay, and the tokenizer without the others.

    Attributes:
        tokens: which tokens stay, and why.
        text: what they were counted in.
        check: how the text falls into tokens before and after.
    """

    tokens: TokenChoice
    text: Text
    check: Check


def plan_vocabulary(
    checkpoint: Checkpoint,
    lines: Lines,
    options: VocabularyOptions,
    progress: Progress = silent,
) -> VocabularyPlan:
    """Count, choose, make the smaller tokenizer, and compare both.

    Args:
        checkpoint: the source; its weights are not read.
        lines: the text whose tokens stay, and that both tokenizers are compared on.
        options: see there.

    Raises:
        UnsupportedModelError: the family, or the kind of tokenizer, is not known.
        CheckpointError: damaged files, or a trimmed tokenizer that cuts the text otherwise.
        DataError, UsageError: options that the tokenizer cannot meet.
    """
    (axis,) = axes_of(
        checkpoint, "token"
    )  # a model that cannot be trimmed is refused before anything is counted
    where = str(checkpoint.path)
    carried = checkpoint.side_files.carried
    side = {path.name: path.read_bytes() for path in carried if path.parent == checkpoint.path}
    if not holds_vocabulary(side):
        raise CheckpointError(
            f"{where}: holds no tokenizer whose vocabulary could be trimmed",
            "Copy the model's tokenizer files (tokenizer.json, tokenizer_config.json, …) into it.",
        )
    tokenizer = load_tokenizer(checkpoint.path)
    text = Text.of(lines, tokenizer)
    vocabulary = read_vocabulary(tokenizer, where)
    documents = with_defaults(checkpoint.config, default_ids(checkpoint)), _generation(side)
    needed = [number for document in documents for number in named_ids(document)]
    counts = count_tokens(tokenizer, text, progress)
    tokens = select_tokens(checkpoint, vocabulary, text, counts, options, needed)
    change = tokens.renumbering
    files = _files(side, documents[1], change, text, is_fast=bool(getattr(tokenizer, "is_fast", False)))
    trimmed = {name: data for name, data in {**side, **files}.items() if data is not None}
    settings = renumbered_settings(checkpoint, change)
    sizes = dict.fromkeys(axis.keys, len(tokens.kept))
    new = load_trimmed(trimmed, {**checkpoint.config, **settings, **sizes}, where)
    check = check_same((tokenizer, new), change.new_ids, text, where, progress)
    return VocabularyPlan(
        {"tokens": tokens.kept},
        options.dtype,
        tokens.step,
        decision=tokens.decision,
        settings=settings,
        files=files,
        tokens=tokens,
        text=text,
        check=check,
    )


def renumbered_settings(checkpoint: Checkpoint, change: Renumbering) -> dict[str, Any]:
    """The keys of config.json whose ids change, with the new ones; those that it leaves to its class among them."""
    full = with_defaults(checkpoint.config, default_ids(checkpoint))
    return {key: value for key, value in renumbered(full, change).items() if value != full[key]}


def default_ids(checkpoint: Checkpoint) -> dict[str, Any]:
    """The ids that transformers takes where config.json names none (`eos_token_id`: 50256 of GPT-2)."""
    from transformers import AutoConfig

    defaults = AutoConfig.for_model(checkpoint.require_architecture().model_type)
    size = vocabulary_size(checkpoint)
    return {
        key: value
        for key, value in defaults.to_dict().items()
        if key.endswith("_token_id") and type(value) is int and 0 <= value < size
    }


def _files(
    side: Mapping[str, bytes],
    generation: Mapping[str, Any],
    change: Renumbering,
    text: Text,
    *,
    is_fast: bool,
) -> dict[str, bytes | None]:
    """The side files that differ. Of a fast tokenizer nothing reads the SentencePiece model: it is compared here."""
    files = tokenizer_files(side, change)
    patched = renumbered(generation, change)
    if patched != generation:
        files[GENERATION] = (json.dumps(patched, indent=2, ensure_ascii=False) + "\n").encode()
    return files | dict.fromkeys(models_that_differ(side, files, text.all) if is_fast else ())


def _generation(side: Mapping[str, bytes]) -> dict[str, Any]:
    if GENERATION not in side:
        return {}
    try:
        value = parsed(side[GENERATION])
    except ValueError as error:
        raise CheckpointError(f"{GENERATION}: not JSON ({error})", "Copy the file again.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{GENERATION}: holds no JSON object", "Copy the file again.")
    return value


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
