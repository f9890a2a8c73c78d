"""Which tokens text falls into, and how often."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from prunecli.progress import Progress, silent
from prunecli.text.choice import Lines
from prunecli.text.tokens import tokenized

BATCH = 4096
"""Sentences that are tokenised at once."""


@dataclass(frozen=True)
class Text:
    """The sentences that the vocabulary has to serve.

    Attributes:
        lines: each once, none blank.
        repeats: how often each occurs.
        splits: those of a directory that they are from.
        languages: of these splits.
        files: names of the others.
    """

    lines: tuple[str, ...]
    repeats: tuple[int, ...]
    splits: tuple[str, ...] = ()
    languages: tuple[str, ...] = ()
    files: tuple[str, ...] = ()

    @classmethod
    def of(cls, lines: Lines) -> Text:
        """The sentences of `lines`."""
        counted = Counter(lines.texts)
        names = () if lines.plain is None else tuple(path.name for path in lines.plain.files)
        return cls(tuple(counted), tuple(counted.values()), lines.splits, lines.languages, names)

    @property
    def sentences(self) -> int:
        """All of them, repeated ones too."""
        return sum(self.repeats)

    @property
    def sha256(self) -> str:
        """A hash of the sentences."""
        digest = hashlib.sha256()
        for line, count in zip(self.lines, self.repeats, strict=True):
            digest.update(f"{count} {line}\n".encode())
        return digest.hexdigest()


@dataclass(frozen=True)
class TokenCounts:
    """How often each token occurs in a text.

    Attributes:
        counts: token -> occurrences; special tokens around the sentences are left out.
    """

    counts: Mapping[str, int]

    @property
    def total(self) -> int:
        """Running tokens."""
        return sum(self.counts.values())

    def share(self, kept: Collection[str]) -> float:
        """The part of the running tokens that are in `kept`; 1 of no text."""
        held = sum(count for token, count in self.counts.items() if token in kept)
        return held / self.total if self.total else 1.0


def count_tokens(tokenizer: Any, text: Text, progress: Progress = silent) -> TokenCounts:
    """Tokenise `text` as source, and as target where that is cut by a model of its own (Marian)."""
    counts: Counter[Any] = Counter()
    modes = 2 if is_two_sided(tokenizer) else 1
    repeats = iter(text.repeats * modes)
    with progress("counting tokens", len(text.lines) * modes, "sentences") as advance:
        for batch in _batches(tokenizer, text.lines):
            for tokens in batch:
                repeated = next(repeats)
                for token in tokens:
                    counts[token] += repeated
            advance(len(batch))
    if getattr(tokenizer, "is_fast", False):
        return TokenCounts({str(tokenizer.convert_ids_to_tokens(key)): n for key, n in counts.items()})
    return TokenCounts(dict(counts))


def is_two_sided(tokenizer: Any) -> bool:
    """Whether source and target text are cut by models of their own."""
    return hasattr(tokenizer, "spm_target")


@contextmanager
def as_target(tokenizer: Any) -> Iterator[None]:
    """Text is target text inside of the block."""
    tokenizer._switch_to_target_mode()
    try:
        yield
    finally:
        tokenizer._switch_to_input_mode()


def _batches(tokenizer: Any, lines: Sequence[str]) -> Iterator[list[list[Any]]]:
    """Tokens of the lines, many lines at a time: ids of a fast tokenizer, text of a slow one (its pieces may be more
    than its vocabulary); those of all lines as target after those of all lines as source.
    """
    for start in range(0, len(lines), BATCH):
        part = list(lines[start : start + BATCH])
        if getattr(tokenizer, "is_fast", False):
            options = {"add_special_tokens": False, "truncation": False, "verbose": False}
            yield tokenized(tokenizer, part, **options)["input_ids"]
        else:
            yield [tokenizer.tokenize(line) for line in part]
    if is_two_sided(tokenizer):
        with as_target(tokenizer):
            for start in range(0, len(lines), BATCH):
                yield [tokenizer.tokenize(line) for line in lines[start : start + BATCH]]
