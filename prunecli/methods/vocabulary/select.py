"""From counted tokens to a choice: which tokens stay. Pure; nothing is written."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from prunecli.choices import Choices
from prunecli.errors import CheckpointError, DataError, UsageError
from prunecli.methods.vocabulary.ids import Renumbering
from prunecli.methods.vocabulary.measure import Text, TokenCounts
from prunecli.methods.vocabulary.vocabulary import Vocabulary
from prunecli.model.decision import Decision, Origin, Ranked
from prunecli.model.find_axes import vocabulary_size
from prunecli.model.history import given, history_step

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


@dataclass(frozen=True)
class TokenChoice:
    """Which tokens stay, and why.

    Attributes:
        kept: their ids, ascending; the new id of each is its place.
        dropped: the tokens that go, where the tokenizer has one for the id.
        size: ids before.
        parts: why -> how many tokens stay for it, each counted once, under the first reason.
        share: of the running tokens that the vocabulary has, those that stay.
        step: the entry for `Structure.history`.
        decision: by what they were chosen.
    """

    kept: tuple[int, ...]
    dropped: frozenset[str]
    size: int
    parts: Mapping[str, int]
    share: float
    step: Mapping[str, object]
    decision: Decision | None = None

    @property
    def renumbering(self) -> Renumbering:
        """New ids."""
        return Renumbering({old: new for new, old in enumerate(self.kept)}, self.dropped, self.size)


def select_tokens(
    checkpoint: Checkpoint,
    vocabulary: Vocabulary,
    text: Text,
    counts: TokenCounts,
    options: VocabularyOptions,
    needed_ids: Iterable[int] = (),
) -> TokenChoice:
    """Choose the tokens to keep.

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
    _check(vocabulary, options, size, str(checkpoint.path))
    tokens = {number: token for token, number in vocabulary.ids.items()}
    parts = _parts(vocabulary, counts, options, {tokens[number] for number in needed_ids if number in tokens})
    kept: set[str] = set().union(*parts.values())
    rows = {number for number in needed_ids if 0 <= number < size and number not in tokens}
    parts["up to a multiple"] = _filling(kept, vocabulary, options.multiple_of, len(rows))
    kept |= parts["up to a multiple"]
    ids = tuple(sorted(rows | {vocabulary.ids[token] for token in kept}))
    sizes = {name: len(part) for name, part in parts.items()} | {NO_TOKEN: len(rows)}
    sizes = {name: number for name, number in sizes.items() if number}
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
        "after": len(ids),
        "parts": sizes,
        "sentences": text.sentences,
        "text_sha256": text.sha256,
    }
    return TokenChoice(
        kept=ids,
        dropped=frozenset(vocabulary.ids) - kept,
        size=size,
        parts=sizes,
        share=TokenCounts({t: n for t, n in counts.counts.items() if t in vocabulary.ids}).share(kept),
        step=history_step(COMMAND, checkpoint, given(arguments), vocabulary=note),
        decision=_decision(text, counts, options, ranked_tokens(vocabulary, counts, parts, size, ids)),
    )


def ranked_tokens(
    vocabulary: Vocabulary,
    counts: TokenCounts,
    parts: Mapping[str, Collection[str]],
    size: int,
    kept: Sequence[int],
) -> Ranked:
    """Every id, how often its token occurs, and for what it stays where that is not the reason."""
    labels, occurring, reason = [""] * size, np.zeros(size), np.zeros(size, np.uint8)
    reasons = [name for name in (*parts, NO_TOKEN) if name != IN_TEXT]
    for token, number in vocabulary.ids.items():
        labels[number] = token
        occurring[number] = counts.counts.get(token, 0)
    reason[[number for number in kept if not labels[number]]] = 1 + reasons.index(NO_TOKEN)
    for name, tokens in parts.items():
        if name != IN_TEXT:
            reason[[vocabulary.ids[token] for token in tokens]] = 1 + reasons.index(name)
    return Ranked.of(
        ("", "", None),
        range(size),
        kept,
        occurring,
        reasons=tuple(reasons),
        reason=reason,
        labels=tuple(labels),
    )


def _decision(text: Text, counts: TokenCounts, options: VocabularyOptions, place: Ranked) -> Decision:
    origin = Origin(
        texts=(*text.languages, *text.files),
        split=" and ".join(text.splits) or None,
        sentences=text.sentences,
        tokens=counts.total,
        sha256=text.sha256,
    )
    how = f"those stay that occur {options.min_count} times or more, and what is needed"
    return Decision(
        "token",
        (place,),
        "count",
        how.replace(" 1 times or more", ""),
        bound=options.min_count,
        origin=origin,
    )


def _check(vocabulary: Vocabulary, options: VocabularyOptions, size: int, where: str) -> None:
    if options.min_count < 1 or options.multiple_of < 1:
        raise UsageError("--min-count and --multiple-of are 1 or more.")
    last = max(vocabulary.ids, key=vocabulary.ids.__getitem__, default="")
    if vocabulary.ids.get(last, 0) >= size:
        raise CheckpointError(
            f"{where}: its tokenizer gives {last!r} the id {vocabulary.ids[last]}, its embeddings have {size} rows",
            "Resize the embeddings to the tokenizer first.",
        )
    for token in options.keep:
        if token not in vocabulary.ids:
            raise DataError(
                f"--keep: the tokenizer has no token {token!r}",
                "Write tokens as the tokenizer does, its mark of a space included: ▁house, Ġhouse.",
            )


def _parts(
    vocabulary: Vocabulary, counts: TokenCounts, options: VocabularyOptions, named: set[str]
) -> dict[str, set[str]]:
    """Why -> tokens, each under its first reason."""
    segmentation = vocabulary.segmentation
    seen = {token for token, count in counts.counts.items() if count >= options.min_count}
    parts = {
        "special and added": set(vocabulary.special) | named,
        "chat template": set(counts.template),
        IN_TEXT: seen,
        "asked for": set(options.keep),
        "characters and bytes": set(segmentation.always),
    }
    parts["on the way to them"] = segmentation.closure(seen | counts.template | set(options.keep))
    known: set[str] = set()
    for name, part in parts.items():
        parts[name] = {token for token in part if token in vocabulary.ids} - known
        known |= parts[name]
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
