"""From a checkpoint, text and options to a plan: which tokens stay, and their tokenizer. Nothing is written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from prunecli.choices import Choices
from prunecli.errors import CheckpointError, DataError, UsageError
from prunecli.methods.vocabulary.check import Check, check_same, differs, load_trimmed
from prunecli.methods.vocabulary.measure import Text, TokenCounts, count_tokens
from prunecli.methods.vocabulary.renumber import (
    GENERATION,
    SENTENCEPIECE,
    VOCABULARIES,
    Renumbering,
    named_ids,
    renumbered,
    tokenizer_files,
)
from prunecli.methods.vocabulary.tokenizer import Vocabulary, is_fast, read_vocabulary
from prunecli.model.decision import Decision, Origin, Ranked
from prunecli.model.find_axes import axes_of, vocabulary_size
from prunecli.model.history import given, history_step
from prunecli.progress import Progress, silent
from prunecli.selection.selection import Selection
from prunecli.tensors.json_files import parsed
from prunecli.text.choice import Lines
from prunecli.text.tokens import load_tokenizer

if TYPE_CHECKING:
    from prunecli.model.checkpoint import Checkpoint

COMMAND = "trim-vocabulary"
IN_TEXT = "in the text"
"""Why a token stays: often enough."""
NO_TOKEN = "no token"
"""Why an id stays that the tokenizer has no token for: a config names it."""


@dataclass(frozen=True)
class VocabularyOptions(Choices):
    """What `trim-vocabulary` is asked.

    Attributes:
        min_count: occurrences that a token needs; with 1 the text falls into the same tokens as before.
        keep: further tokens, as the tokenizer writes them.
        multiple_of: the number of tokens is made a multiple of it, by keeping more; 1: no more than needed.
        dtype: type of the result; None: as stored.
    """

    min_count: int = 1
    keep: tuple[str, ...] = ()
    multiple_of: int = 1
    dtype: str | None = None


@dataclass(frozen=True, kw_only=True)
class VocabularyPlan(Selection):
    """Which tokens stay and why, and the tokenizer without the others.

    Attributes:
        renumbering: the new id of each token is its place among those that stay.
        parts: why -> how many tokens stay for it, each counted once, under the first reason.
        share: of the running tokens that the vocabulary has, those that stay.
        text: what they were counted in.
        check: how the text falls into tokens before and after.
    """

    renumbering: Renumbering
    parts: Mapping[str, int]
    share: float
    text: Text
    check: Check = field(default_factory=Check)


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
    # A model that cannot be trimmed is refused before anything is counted.
    (axis,) = axes_of(checkpoint, "token")
    where = str(checkpoint.path)
    carried = checkpoint.side_files.carried
    side = {path.name: path.read_bytes() for path in carried if path.parent == checkpoint.path}
    # Without a vocabulary, transformers makes up a tokenizer of nothing.
    if not any(name in VOCABULARIES or name.endswith(SENTENCEPIECE) for name in side):
        raise CheckpointError(
            f"{where}: holds no tokenizer whose vocabulary could be trimmed",
            "Copy the model's tokenizer files (tokenizer.json, tokenizer_config.json, …) into it.",
        )
    tokenizer = load_tokenizer(checkpoint.path)
    text = Text.of(lines, tokenizer)
    vocabulary = read_vocabulary(tokenizer, where)
    config = {**default_ids(checkpoint), **checkpoint.config}
    needed = [*named_ids(config), *named_ids(_generation(side))]
    counts = count_tokens(tokenizer, text, progress)
    plan = select_tokens(checkpoint, vocabulary, text, counts, options, needed)
    change = plan.renumbering
    files = tokenizer_files(side, change)
    if is_fast(tokenizer):  # nothing reads the SentencePiece models beside it: they are compared here
        for name, data in files.items():
            if name.endswith(SENTENCEPIECE) and data is not None and differs(side[name], data, text.all):
                files[name] = None
    trimmed = {name: data for name, data in {**side, **files}.items() if data is not None}
    settings = {key: value for key, value in renumbered(config, change).items() if value != config[key]}
    sizes = dict.fromkeys(axis.keys, len(change.new_ids))
    new = load_trimmed(trimmed, {**checkpoint.config, **settings, **sizes}, where)
    check = check_same((tokenizer, new), change.new_ids, text, where, progress)
    return replace(plan, settings=settings, files=files, check=check)


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


def _generation(side: Mapping[str, bytes]) -> dict[str, Any]:
    try:
        value = parsed(side.get(GENERATION, b"{}"))
    except ValueError as error:
        raise CheckpointError(f"{GENERATION}: not JSON ({error})", "Copy the file again.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{GENERATION}: holds no JSON object", "Copy the file again.")
    return value


def select_tokens(
    checkpoint: Checkpoint,
    vocabulary: Vocabulary,
    text: Text,
    counts: TokenCounts,
    options: VocabularyOptions,
    needed_ids: Iterable[int] = (),
) -> VocabularyPlan:
    """Choose the tokens to keep; their tokenizer is not made yet.

    Args:
        checkpoint: the source.
        vocabulary: of its tokenizer.
        text: what was counted, for the history.
        counts: how often each token occurs in it.
        options: what is asked.
        needed_ids: ids that its configs name.

    Raises:
        UsageError: a `min_count` or `multiple_of` below 1.
        DataError: a token of `keep` that the tokenizer lacks.
        CheckpointError: the tokenizer has tokens that the embeddings lack.
    """
    size = vocabulary_size(checkpoint)
    tokens = {number: token for token, number in vocabulary.ids.items()}
    if options.min_count < 1 or options.multiple_of < 1:
        raise UsageError("--min-count and --multiple-of are 1 or more.")
    last = max(tokens, default=0)
    if last >= size:
        raise CheckpointError(
            f"{checkpoint.path}: its tokenizer gives {tokens[last]!r} the id {last}, its embeddings have {size} rows",
            "Resize the embeddings to the tokenizer first.",
        )
    for token in options.keep:
        if token not in vocabulary.ids:
            raise DataError(
                f"--keep: the tokenizer has no token {token!r}",
                "Write tokens as the tokenizer does, its mark of a space included: ▁house, Ġhouse.",
            )
    by_reason = _kept(
        vocabulary, counts, options, {tokens[number] for number in needed_ids if number in tokens}
    )
    kept: set[str] = set().union(*by_reason.values())
    rows = {number for number in needed_ids if 0 <= number < size and number not in tokens}
    by_reason["up to a multiple"] = _filling(kept, vocabulary, options.multiple_of, len(rows))
    kept |= by_reason["up to a multiple"]
    ids = {name: {vocabulary.ids[token] for token in part} for name, part in by_reason.items()}
    ids[NO_TOKEN] = rows
    kept_ids = tuple(sorted(set().union(*ids.values())))
    parts = {name: len(part) for name, part in ids.items() if part}
    arguments = {
        "split": list(text.splits),
        "langs": list(text.languages),
        "text": list(text.files),
        "min_count": options.min_count,
        "multiple_of": None if options.multiple_of == 1 else options.multiple_of,
        "dtype": options.dtype,
    }
    note = {
        "before": size,
        "after": len(kept_ids),
        "parts": parts,
        "sentences": text.sentences,
        "text_sha256": text.sha256,
    }
    reasons = [name for name in ids if name != IN_TEXT]
    reason = {number: place for place, name in enumerate(reasons, 1) for number in ids[name]}
    labels = [tokens.get(number, "") for number in range(size)]
    ranked = Ranked.of(
        ("tokens", "", None),
        range(size),
        kept_ids,
        [counts.counts.get(label, 0) for label in labels],
        reasons=tuple(reasons),
        reason=np.array([reason.get(number, 0) for number in range(size)], np.uint8),
        labels=tuple(labels),
    )
    origin = Origin(
        texts=(*text.languages, *text.files),
        split=" and ".join(text.splits) or None,
        sentences=text.sentences,
        tokens=sum(counts.counts.values()),
        sha256=text.sha256,
    )
    often = "" if options.min_count == 1 else f" {options.min_count} times or more"
    how = f"those stay that occur{often}, and what is needed"
    running = {token: count for token, count in counts.counts.items() if token in vocabulary.ids}
    stays = sum(count for token, count in running.items() if token in kept)
    return VocabularyPlan(
        {"tokens": kept_ids},
        options.dtype,
        history_step(COMMAND, checkpoint, given(arguments), vocabulary=note),
        decision=Decision("token", (ranked,), "count", how, bound=options.min_count, origin=origin),
        renumbering=Renumbering(
            {old: new for new, old in enumerate(kept_ids)}, frozenset(vocabulary.ids) - kept, size
        ),
        parts=parts,
        share=stays / sum(running.values()) if running else 1.0,
        text=text,
    )


def _kept(
    vocabulary: Vocabulary, counts: TokenCounts, options: VocabularyOptions, named: set[str]
) -> dict[str, set[str]]:
    """Why -> tokens, each under its first reason."""
    segmentation = vocabulary.segmentation
    seen = {token for token, count in counts.counts.items() if count >= options.min_count}
    wanted = {
        "special and added": vocabulary.special | named,
        "chat template": counts.template,
        IN_TEXT: seen,
        "asked for": set(options.keep),
        "characters and bytes": segmentation.always,
        "on the way to them": segmentation.closure({*seen, *counts.template, *options.keep}),
    }
    parts: dict[str, set[str]] = {}
    for name, tokens in wanted.items():
        parts[name] = (vocabulary.ids.keys() & tokens).difference(*parts.values())
    return parts


def _filling(kept: set[str], vocabulary: Vocabulary, multiple: int, rows: int) -> set[str]:
    """More tokens, those of the lowest ids first, so that they, `kept` and `rows` others are a multiple."""
    filling: set[str] = set()
    for token in sorted(vocabulary.ids, key=vocabulary.ids.__getitem__):
        room = -(len(kept) + len(filling) + rows) % multiple
        if room == 0:
            break
        if token not in kept and token not in filling:
            needed = vocabulary.segmentation.closure([token]) & vocabulary.ids.keys()
            if len(added := needed - kept - filling) <= room:
                filling |= added
    return filling
