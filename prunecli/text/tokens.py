"""A checkpoint's tokenizer, with the language tokens of translation models."""

import warnings
from collections.abc import Iterable, Sequence
from copy import copy
from pathlib import Path
from typing import Any

from prunecli.architectures import OLDER_TYPES, REDUCED_PREFIX
from prunecli.errors import CheckpointError, DataError, TextWarning, damaged
from prunecli.tensors.json_files import (
    LONE,
    has_lone_surrogates,
    lenient,
    read_object,
    refuse_pointers_beside_weights,
)
from prunecli.text.files import near_names

Tokenizer = Any
"""A tokenizer of transformers."""
VOCABULARIES = ("tokenizer.json", "vocab*", "*.model", "*.spm", "*.tiktoken", "*.tokenizer", "tekken.json")
"""Files that hold a tokenizer's tokens; a few kinds, such as those of bytes, have none."""
SEAMLESS = "SeamlessM4TTokenizer"
"""The class whose models have a `generate` of their own, and targets that begin with the end token."""


def load_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer of a checkpoint directory, from its own files alone; no code of the directory is run.

    Raises:
        CheckpointError: no such directory, no tokenizer in it that transformers can read, or Git LFS pointers.
    """
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: no such directory", "Name a checkpoint directory.")
    refuse_pointers_beside_weights(directory)
    from transformers import AutoTokenizer

    config = _stock_config(directory)
    remedy = "Copy the model's tokenizer files (tokenizer.json, tokenizer_config.json, …) into it."
    is_missing = not any(file for pattern in VOCABULARIES for file in directory.glob(pattern))
    missing = f"{directory}: the tokenizer is missing: none of {', '.join(VOCABULARIES)} is there"
    with damaged(f"{directory}: no tokenizer could be loaded", remedy):
        try:
            tokenizer = AutoTokenizer.from_pretrained(
                str(directory),
                config=config,
                local_files_only=True,
                trust_remote_code=False,
                mistral_format=False,  # mistral-common would read tekken.json in place of tokenizer.json
            )
        except ValueError as error:
            if is_missing:
                raise CheckpointError(missing, remedy) from error
            raise
        # Of files that the class does not read, transformers makes one with special tokens alone.
        if len(tokenizer.get_vocab().keys() - tokenizer.get_added_vocab().keys()) < 2:
            unread = f"{directory}: the tokenizer knows no tokens: {type(tokenizer).__name__} reads none of its files"
            raise CheckpointError(missing if is_missing else unread, remedy)
        if has_lone_surrogates([getattr(tokenizer, name, None) for name in ("init_kwargs", "chat_template")]):
            raise ValueError(f"its settings hold {LONE}, which cannot be saved")
    return tokenizer


@lenient  # the model's reader says what is wrong with config.json
def _stock_config(directory: Path) -> Any:
    """A config of the family, where transformers would stumble over the checkpoint's type or `auto_map`."""
    config = read_object(directory / "config.json")
    model_type = config["model_type"]
    is_stock = not model_type.startswith(REDUCED_PREFIX) and model_type not in OLDER_TYPES
    if is_stock and "auto_map" not in config:
        return None
    from transformers import AutoConfig

    return AutoConfig.for_model(OLDER_TYPES.get(model_type, model_type).removeprefix(REDUCED_PREFIX))


def languages(tokenizer: Tokenizer) -> tuple[str, ...]:
    """The language codes that the tokenizer has a token for, sorted; empty where it knows none."""
    return tuple(sorted(_language_tokens(tokenizer)))


def _language_tokens(tokenizer: Tokenizer) -> dict[str, str]:
    """Language code -> its token: `en` -> `__en__` of M2M-100, PLBart and SeamlessM4T."""
    plain = {*tokenizer.special_tokens_map.values()}
    # Other added tokens are words. M2M-100 and PLBart do not add those of languages.
    added = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special} - plain
    names = getattr(tokenizer, "lang_token_to_id", getattr(tokenizer, "lang_code_to_id", added))
    return {name.strip("_"): name for name in names if name.replace("_", "").replace("-", "").isalnum()}


def language_id(tokenizer: Tokenizer, language: str, vocabulary: int | None = None) -> int:
    """The token id of a language code (`eng_Latn`), which translation models force as the first output token.

    Args:
        vocabulary: see `require_rows`; None: any id will do.

    Raises:
        DataError: the tokenizer has no token for it; the message lists a few near ones.
        CheckpointError: the model's table has no row for it.
    """
    known = _language_tokens(tokenizer)
    if language not in known:
        raise DataError(
            f"unknown language {language!r}: the model's tokenizer lacks it",
            f"{near_names(language, known)} Give text in languages of the model with `data`.",
        )
    number = int(tokenizer.convert_tokens_to_ids(known[language]))
    require_rows(tokenizer, [[number]], vocabulary)
    return number


def encode(
    tokenizer: Tokenizer,
    sentences: Sequence[str],
    language: str,
    *,
    as_target: bool = False,
    max_length: int | None = None,
    vocabulary: int | None = None,
) -> list[list[int]]:
    """Token ids of each sentence, with the language token and the end token that the model expects.

    An empty sentence is those tokens alone. Where the tokenizer knows no languages, `language` is not used.

    Args:
        language: the sentences' language.
        as_target: mark them as the output language (labels) instead of the input language.
        max_length: cut longer sentences to so many tokens, special tokens included; None: never.
        vocabulary: see `require_rows`; None: any id will do.

    Raises:
        DataError: the tokenizer lacks `language`.
        CheckpointError: the tokenizer does not work, or not with a table of `vocabulary` rows.
    """
    if hasattr(tokenizer, "src_lang") and languages(tokenizer):
        language_id(tokenizer, language)
        setattr(tokenizer, "tgt_lang" if as_target else "src_lang", language)
    if as_target and hasattr(tokenizer, "tgt_vocab_file"):  # FSMT's tokenizer takes every text for a source
        tokenizer = copy(tokenizer)
        tokenizer.encoder = {token: number for number, token in tokenizer.decoder.items()}
        tokenizer.src_lang = tokenizer.tgt_lang
    if not sentences:
        return []  # which tokenizers stumble over
    key = "text_target" if as_target else "text"
    options = {} if max_length is None else {"truncation": True, "max_length": max_length}
    rows = [list(row) for row in tokenized(tokenizer, **{key: list(sentences)}, **options)["input_ids"]]
    if as_target and type(tokenizer).__name__ == SEAMLESS:
        rows = [row[1:] for row in rows]  # the end token, which the model's shift puts there
    require_rows(tokenizer, rows, vocabulary)
    return rows


def tokenized(tokenizer: Tokenizer, *texts: Any, **options: Any) -> Any:
    """`tokenizer(*texts, **options)`; warns if more than a quarter of the tokens are unknown.

    Raises:
        CheckpointError: it fails, because its files say what cannot be.
    """
    remedy = "Copy the model's tokenizer files into it again."
    with damaged(f"{tokenizer.name_or_path}: the tokenizer does not work", remedy):
        found = tokenizer(*texts, **options)
    rows, unknown = found["input_ids"], tokenizer.unk_token_id
    # Some tokenizers use one token for unknown words and for the ends of texts.
    if unknown not in (None, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) and (
        4 * sum(row.count(unknown) for row in rows) > sum(map(len, rows))
    ):
        warnings.warn(
            f"{tokenizer.name_or_path}: more than a quarter of a text's tokens are unknown to the tokenizer: "
            "the text may be in a language or script that the model does not know.",
            TextWarning,
            stacklevel=2,
        )
    return found


def require_rows(tokenizer: Tokenizer, rows: Iterable[Sequence[int]], vocabulary: int | None) -> None:
    """Refuse token ids that the model's table has no row for, as where tokens were added to the tokenizer alone.

    Args:
        rows: token ids of texts, as `tokenizer` makes them.
        vocabulary: rows of the table. If None, any id will do.

    Raises:
        CheckpointError: there is such an id, or what is no id at all.
    """
    if vocabulary is None:
        return
    try:
        ids: list[int | None] = [bound for row in rows if row for bound in (min(row), max(row))]
    except TypeError:  # of a token that it does not know, and it has none for unknown ones
        ids = [None]
    odd = [one for one in ids if one is None or not 0 <= one < vocabulary]
    if odd:
        number = odd[0]
        token = "" if number is None else f" ({tokenizer.convert_ids_to_tokens(max(number, 0))!r})"
        raise CheckpointError(
            f"{tokenizer.name_or_path}: the tokenizer gives the id {number}{token}, "
            f"and the model's table has {vocabulary:,} rows",
            "Copy the model's own tokenizer files into it, or resize the model's embeddings to this tokenizer.",
        )
