"""Text as training examples: encoded by the model's tokenizer, once for each language and role."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain, compress
from typing import Any

import numpy as np
import torch

from prunecli.errors import DataError, UnsupportedModelError
from prunecli.evaluation.decoding import max_positions
from prunecli.evaluation.losses import context_length, encoded, padding_id, require_task, window_length
from prunecli.evaluation.objective import decoder_inputs
from prunecli.evaluation.windows import started
from prunecli.progress import Progress, silent
from prunecli.text.labelled import LabelledText, label_ids
from prunecli.text.parallel import ParallelText
from prunecli.text.tokens import encode, tokenized
from prunecli.training.examples import Labelled, Masked, Sequences, Texts, Translations

AT_ONCE = 1 << 12
"""Lines that are tokenised between two reports."""


def translations(
    tokenizer: Any,
    model: Any,
    text: ParallelText,
    pairs: Sequence[tuple[str, str]],
    progress: Progress = silent,
) -> Translations:
    """The sentences of all `pairs`; a line that is blank on either side is left out, what is too long is cut.

    Raises:
        UnsupportedModelError: not an encoder with a decoder.
        DataError: the tokenizer lacks a language, or every line is blank.
    """
    require_task(model, "translation")
    positions = max_positions(model.config)
    longest = None if positions is None else positions - 1
    rows = _tokenised(tokenizer, text, pairs, longest, progress)
    filled = {name: [bool(line.strip()) for line in text.sentences[name]] for name, _ in rows}
    sources: list[list[int]] = []
    targets: list[list[int]] = []
    for source, target in pairs:
        kept = [one and other for one, other in zip(filled[source], filled[target], strict=True)]
        sources += compress(rows[source, False], kept)
        targets += compress(rows[target, True], kept)
    if not sources:
        raise DataError(f"{text.split}: every line is blank in one of the languages", "Give other text.")
    shift = partial(decoder_inputs, model)
    return Translations(Sequences(sources), Sequences(targets), padding_id(model, tokenizer), shift)


def _tokenised(
    tokenizer: Any,
    text: ParallelText,
    pairs: Sequence[tuple[str, str]],
    longest: int | None,
    progress: Progress,
) -> dict[tuple[str, bool], list[list[int]]]:
    """Token ids of each line, once for each (language, whether as a target), however many pairs it is in."""
    roles = ((source, False) for source, _ in pairs), ((target, True) for _, target in pairs)
    rows: dict[tuple[str, bool], list[list[int]]] = {role: [] for role in chain(*roles)}
    with progress("tokenising", len(rows) * len(text), "lines") as advance:
        for (name, as_target), made in rows.items():
            for start in range(0, len(text), AT_ONCE):
                lines = text.sentences[name][start : start + AT_ONCE]
                made += encode(tokenizer, lines, name, as_target=as_target, max_length=longest)
                advance(len(lines))
    return rows


def texts(tokenizer: Any, model: Any, lines: Sequence[str], context: int | None = None) -> Texts:
    """Lines one after another, each ended by the end token, cut into windows in which each token is predicted once.

    A window may hold several lines and parts of them: attention and positions run on from one to the next within it, as
    in the training of GPT-2 (and in transformers' run_clm). Where the tokenizer has no end token there is none.

    Args:
        context: tokens of a window; default: see `window_length`.

    Raises:
        UnsupportedModelError: not a causal language model.
        UsageError: the model has fewer positions than `context`.
        DataError: there is no token to predict.
    """
    require_task(model, "lm")
    length, end = window_length(model, tokenizer, context), tokenizer.eos_token_id
    stream: list[int] = []
    for line in encoded(tokenizer, lines):
        stream += line
        if end is not None and line[-1:] != [end]:
            stream.append(end)
    stream = started(tokenizer, stream)
    if len(stream) < 2:
        raise DataError("there is no token to predict")
    starts = range(0, len(stream) - 1, length)
    ids = Sequences([stream[start : min(start + length, len(stream) - 1)] for start in starts])
    labels = Sequences([stream[start + 1 : start + 1 + length] for start in starts])
    return Texts(ids, labels, padding_id(model, tokenizer))


def labelled(tokenizer: Any, model: Any, text: LabelledText) -> Labelled:
    """Texts, or pairs of them, with their classes; what is longer than the model's positions is cut.

    Raises:
        UnsupportedModelError: the model has no classification head.
        DataError: a label that the model does not know.
    """
    require_task(model, "classification")
    labels = label_ids(text, model.config.id2label)
    options = {"truncation": True, "max_length": context_length(model, tokenizer), "verbose": False}
    seconds = None if text.seconds is None else list(text.seconds)
    made = tokenized(tokenizer, list(text.texts), seconds, **options)
    names = [name for name in ("input_ids", "token_type_ids") if name in made]
    return Labelled(
        {name: Sequences(made[name]) for name in names}, torch.tensor(labels), padding_id(model, tokenizer)
    )


def masked(tokenizer: Any, model: Any, lines: Sequence[str], seed: int, context: int | None = None) -> Masked:
    """Texts for a masked language model; those without a token to hide are left out, what is too long is cut.

    Raises:
        UnsupportedModelError: not a masked language model, or its tokenizer has no mask token.
        UsageError: the model has fewer positions than `context`.
        DataError: no text has a token to hide.
    """
    require_task(model, "mlm")
    if tokenizer.mask_token_id is None:
        raise UnsupportedModelError("mlm: the tokenizer has no mask token")
    special = np.zeros(max(tokenizer.get_vocab().values()) + 1, np.bool_)
    special[sorted(set(tokenizer.all_special_ids) - {tokenizer.unk_token_id})] = True
    cut = {"truncation": True, "max_length": window_length(model, tokenizer, context)}
    rows = [ids for ids in encoded(tokenizer, lines, **cut) if not all(special[token] for token in ids)]
    if not rows:
        raise DataError("no text has a token that could be hidden")
    words = np.flatnonzero(~special)
    return Masked(
        Sequences(rows), special, words, tokenizer.mask_token_id, padding_id(model, tokenizer), seed
    )
