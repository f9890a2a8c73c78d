"""What a checkpoint's tokenizer knows: its tokens, those that never go, and how it cuts words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prunecli.errors import UnsupportedModelError
from prunecli.methods.vocabulary.segmentation import Segmentation, of_backend, of_sentencepiece
from prunecli.methods.vocabulary.sentencepiece_model import read_model


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer's tokens.

    Attributes:
        ids: token -> id.
        special: special and added tokens, language codes: none of them may go.
        segmentation: how words are cut.
    """

    ids: Mapping[str, int]
    special: frozenset[str]
    segmentation: Segmentation


def read_vocabulary(tokenizer: Any, where: str) -> Vocabulary:
    """The vocabulary of a tokenizer of transformers.

    Args:
        tokenizer: one of the `tokenizers` library, or one that runs SentencePiece (Marian, M2M-100).
        where: what messages begin with.

    Raises:
        UnsupportedModelError: a tokenizer of another kind.
    """
    ids = token_ids(tokenizer, where)
    special = {str(token) for token in (*tokenizer.get_added_vocab(), *tokenizer.all_special_tokens)}
    if getattr(tokenizer, "is_fast", False):
        segmentation = of_backend(tokenizer.backend_tokenizer, where)
    else:
        special |= {*_codes(tokenizer), *getattr(tokenizer, "supported_language_codes", ())}
        models = [read_model(path.read_bytes()) for path in sentencepiece_files(tokenizer)]
        segmentation = of_sentencepiece(models, ids, where)
    return Vocabulary(ids, frozenset(token for token in special if token in ids), segmentation)


def token_ids(tokenizer: Any, where: str) -> dict[str, int]:
    """Token -> id, language codes included.

    Raises:
        UnsupportedModelError: a tokenizer of another kind than `read_vocabulary` knows.
    """
    if getattr(tokenizer, "is_fast", False):
        return {str(token): int(number) for token, number in tokenizer.get_vocab().items()}
    encoder = getattr(tokenizer, "encoder", None)
    separate = getattr(tokenizer, "separate_vocabs", False)
    if not isinstance(encoder, dict) or not sentencepiece_files(tokenizer) or separate:
        raise UnsupportedModelError(
            f"{where}: its tokenizer is a {type(tokenizer).__name__}, which trim-vocabulary does not know",
            "A tokenizer.json, or the files of a Marian or M2M-100 tokenizer, are supported.",
        )
    return {**encoder, **tokenizer.get_added_vocab(), **_codes(tokenizer)}


def _codes(tokenizer: Any) -> dict[str, int]:
    """The language codes of M2M-100, which come after its vocab.json."""
    return dict(getattr(tokenizer, "lang_token_to_id", {}))


def sentencepiece_files(tokenizer: Any) -> tuple[Path, ...]:
    """The SentencePiece models that a slow tokenizer runs."""
    found = getattr(tokenizer, "spm_files", None) or [getattr(tokenizer, "spm_file", None)]
    return tuple(Path(path) for path in found if path is not None)
