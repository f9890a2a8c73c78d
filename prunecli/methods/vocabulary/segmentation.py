"""How a tokenizer cuts words into tokens, and so which tokens the kept ones cannot do without.

A text falls into the same tokens as before if what led to them is still there, and nothing new can win:

- BPE (1508.07909) merges the pair of lowest rank first. Merges are kept whose parts and result are kept; with every
  token on the way from characters to the seen tokens, each step finds the pair that it found before.
- Unigram (1804.10959) takes the path of the highest sum of scores. Fewer pieces are fewer paths, among which the best
  one stays the best. An unknown character costs 10 more than the least likely piece, which is why that one stays.
- WordPiece and whole words take the longest token, or the word: that one is kept.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from prunecli.errors import UnsupportedModelError
from prunecli.methods.vocabulary.sentencepiece_model import BPE, NORMAL, UNIGRAM, SentencePieceModel
from prunecli.tensors.json_files import parsed

_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")

Rank = Callable[[str, str], "float | None"]
"""The rank of the merge of two neighbours, the lowest first; None where they do not merge."""


@dataclass(frozen=True)
class Segmentation:
    """What a tokenizer's model needs.

    Attributes:
        kind: "BPE", "Unigram", "WordPiece" or "WordLevel".
        always: tokens that stay whatever the text: single characters, bytes, the scores' extremes.
        ranks: of BPE, one for each model.
    """

    kind: str
    always: frozenset[str]
    ranks: tuple[Rank, ...] = field(default=(), compare=False)

    def closure(self, tokens: Iterable[str]) -> set[str]:
        """`tokens` and every token that is merged on the way to one of them."""
        reached = set(tokens)
        for rank in self.ranks:
            for token in list(reached):
                reached.update(products(token, rank))
        return reached


def products(token: str, rank: Rank) -> list[str]:
    """What is merged on the way from characters to `token`, in order, itself last; empty where no merges lead there.

    Merges inside of a token do not depend on what stands around it: one across its border would have prevented it.
    """
    symbols: Sequence[str] = list(token)
    merged: list[str] = []
    while len(symbols) > 1:
        ranks = [
            (value, index)
            for index, pair in enumerate(pairwise(symbols))
            if (value := rank(*pair)) is not None
        ]
        if not ranks:
            return []
        _, index = min(ranks)
        merged.append(symbols[index] + symbols[index + 1])
        symbols = [*symbols[:index], merged[-1], *symbols[index + 2 :]]
    return merged


def of_backend(backend: Any, where: str) -> Segmentation:
    """Of a tokenizer of the `tokenizers` library, from what it says of its model.

    Raises:
        UnsupportedModelError: another kind of model, or of BPE.
    """
    model = parsed(backend.to_str())["model"]
    kind = model.get("type")
    if kind == "BPE":
        for key in ("continuing_subword_prefix", "end_of_word_suffix"):
            if model.get(key):
                raise UnsupportedModelError(
                    f'{where}: its BPE tokenizer has a "{key}", which trim-vocabulary does not know',
                    "BPE without one, Unigram and WordPiece are supported.",
                )
        ranks = {tuple(merge_parts(merge)): index for index, merge in enumerate(model["merges"])}
        return Segmentation(kind, _always(model["vocab"]), (lambda a, b: ranks.get((a, b)),))
    if kind == "Unigram":
        pieces = [(str(text), float(score)) for text, score in model["vocab"]]
        if len({text for text, _ in pieces}) != len(pieces):
            raise UnsupportedModelError(f"{where}: its Unigram tokenizer holds a piece twice")
        return Segmentation(kind, _always(text for text, _ in pieces) | _extremes(pieces))
    if kind == "WordPiece":
        prefix = str(model["continuing_subword_prefix"])
        return Segmentation(kind, _always(model["vocab"], prefix))
    if kind == "WordLevel":
        return Segmentation(kind, _always(model["vocab"]))
    raise UnsupportedModelError(
        f'{where}: its tokenizer is of the kind "{kind}", which trim-vocabulary does not know',
        "BPE, Unigram, WordPiece and WordLevel are supported.",
    )


def of_sentencepiece(
    models: Sequence[SentencePieceModel], vocabulary: Iterable[str], where: str
) -> Segmentation:
    """Of a tokenizer that runs SentencePiece models, beside a vocabulary of its own.

    Raises:
        UnsupportedModelError: a model that is neither Unigram nor BPE.
    """
    always, ranks = _always(vocabulary), []
    for model in models:
        pieces = [(piece.text, piece.score) for piece in model.pieces if piece.type == NORMAL]
        if model.model_type == BPE:
            ranks.append(_score_rank(dict(pieces)))
        elif model.model_type != UNIGRAM:
            raise UnsupportedModelError(
                f"{where}: a SentencePiece model of words or characters, which trim-vocabulary does not know",
                "BPE and Unigram are supported.",
            )
        always |= _always(text for text, _ in pieces) | _extremes(pieces)
    return Segmentation("BPE" if ranks else "Unigram", always, tuple(ranks))


def merge_parts(merge: Any) -> list[str]:
    """The two parts of a merge, written as a list or, in older files, as "left right"."""
    return merge.split(" ", 1) if isinstance(merge, str) else list(merge)


def _score_rank(scores: dict[str, float]) -> Rank:
    """SentencePiece merges the neighbours whose union has the highest score."""

    def rank(left: str, right: str) -> float | None:
        score = scores.get(left + right)
        return None if score is None else -score

    return rank


def _always(tokens: Iterable[str], prefix: str = "") -> frozenset[str]:
    return frozenset(
        token
        for token in tokens
        if len(token) == 1 or _BYTE.fullmatch(token) or (prefix and len(token.removeprefix(prefix)) == 1)
    )


def _extremes(pieces: Sequence[tuple[str, float]]) -> frozenset[str]:
    if not pieces:
        return frozenset()
    ends = (min(pieces, key=lambda piece: piece[1]), max(pieces, key=lambda piece: piece[1]))
    return frozenset(text for text, _ in ends)
