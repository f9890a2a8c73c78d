"""Examples in batches, and their losses, for each thing that a model is trained for.

The batches of a task go through `example_losses`. Batching changes no example's loss: padding is masked, and what is
random is seeded per example.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from prunecli.errors import DataError, UnsupportedModelError
from prunecli.evaluation.decoding import max_positions
from prunecli.evaluation.losses import (
    IGNORED,
    Batch,
    context_length,
    encoded,
    example_losses,
    padding_id,
    require_finite,
    require_task,
    token_losses,
    window_length,
)
from prunecli.evaluation.windows import lm_batches
from prunecli.text.batching import length_bucketed, pad
from prunecli.text.labelled import LabelledText, label_ids
from prunecli.text.parallel import ParallelText
from prunecli.text.tokens import encode, tokenized

__all__ = [
    "IGNORED",
    "Batch",
    "classification_batches",
    "context_length",
    "decoder_inputs",
    "example_losses",
    "lm_batches",
    "mlm_batches",
    "padding_id",
    "require_finite",
    "require_task",
    "token_losses",
    "translation_batches",
]

MASK_PROBABILITY = 0.15
MASKED_SHARE, RANDOM_SHARE = 0.8, 0.1
"""Of the chosen tokens: so many become the mask token, so many a random one; the rest stays (1810.04805, 3.1)."""


def translation_batches(
    tokenizer: Any, model: Any, text: ParallelText, pair: tuple[str, str], batch_tokens: int
) -> list[Batch]:
    """Sources with their references, for teacher forcing; the decoder's inputs are the model's own shift of them.

    Sentences that are longer than the model's positions are cut. Languages are marked as `collect-gates` does it,
    where the tokenizer knows languages.

    Raises:
        UnsupportedModelError: not an encoder with a decoder.
        DataError: the tokenizer lacks a language.
    """
    require_task(model, "translation")
    positions = max_positions(model.config)
    longest = None if positions is None else positions - 1
    sources = encode(tokenizer, text.sentences[pair[0]], pair[0], max_length=longest)
    targets = encode(tokenizer, text.sentences[pair[1]], pair[1], as_target=True, max_length=longest)
    lengths = [(len(source), len(target)) for source, target in zip(sources, targets, strict=True)]
    pad_id = padding_id(model, tokenizer)
    batches = []
    for rows in length_bucketed(lengths, batch_tokens):
        ids, mask = pad([sources[i] for i in rows], pad_id)
        labels, real = pad([targets[i] for i in rows], pad_id)
        labels = labels.masked_fill(real == 0, IGNORED)
        inputs = {
            "input_ids": ids,
            "attention_mask": mask,
            "decoder_input_ids": decoder_inputs(model, labels),
            "decoder_attention_mask": real,
        }
        batches.append(Batch(inputs, labels, tuple(rows)))
    return batches


def decoder_inputs(model: Any, labels: Tensor) -> Tensor:
    """The model's own shift of `labels` `[B, T]` to the right, as its `forward` would make it."""
    if hasattr(model, "prepare_decoder_input_ids_from_labels"):
        shifted: Tensor = model.prepare_decoder_input_ids_from_labels(labels=labels)
        return shifted
    config = model.config
    for base in type(model).__mro__:
        shift = getattr(sys.modules.get(base.__module__), "shift_tokens_right", None)
        if shift is not None:
            made: Tensor = shift(labels, config.pad_token_id, config.decoder_start_token_id)
            return made
    raise UnsupportedModelError(f"{type(model).__name__} does not say how its decoder's inputs are made")


def classification_batches(tokenizer: Any, model: Any, text: LabelledText, batch_tokens: int) -> list[Batch]:
    """Sentences, or pairs of them, with their classes. What is longer than the model's positions is cut.

    Raises:
        UnsupportedModelError: the model has no classification head, or one for something else than one of two or
            more classes.
        DataError: a label that the model does not know.
    """
    require_task(model, "classification")
    if model.config.num_labels < 2 or model.config.problem_type not in (None, "single_label_classification"):
        raise UnsupportedModelError("classification: the model's head does not choose one of several classes")
    labels = label_ids(text, model.config.id2label)
    options = {"truncation": True, "max_length": context_length(model, tokenizer)}
    seconds = None if text.seconds is None else list(text.seconds)
    made = tokenized(tokenizer, list(text.texts), seconds, **options)
    sequences, segments = made["input_ids"], made.get("token_type_ids")
    pad_id = padding_id(model, tokenizer)
    # Decoders look for the last token before the padding, and must know what padding is.
    alone = model.config.pad_token_id is None
    batches = []
    for rows in length_bucketed([len(row) for row in sequences], batch_tokens, 1 if alone else None):
        ids, mask = pad([sequences[i] for i in rows], pad_id)
        inputs = {"input_ids": ids, "attention_mask": mask}
        if segments is not None:
            inputs["token_type_ids"] = pad([segments[i] for i in rows], 0)[0]
        batches.append(Batch(inputs, torch.tensor([labels[i] for i in rows]), tuple(rows)))
    return batches


def mlm_batches(
    tokenizer: Any,
    model: Any,
    texts: Sequence[str],
    batch_tokens: int,
    *,
    context: int | None = None,
    seed: int = 0,
    probability: float = MASK_PROBABILITY,
) -> list[Batch]:
    """Texts with a share of their tokens hidden, which are to be found again (BERT, 1810.04805, 3.1).

    Each token that is not a special one is chosen with `probability`, at least one of a text; of the chosen ones 80 %
    become the mask token, 10 % a random token, 10 % stay. What is longer than a window is cut.

    Args:
        context: tokens of a window; default: see `window_length`.
        seed: with the number of the text it determines what is chosen.

    Raises:
        UnsupportedModelError: the model is not a masked language model, or its tokenizer has no mask token.
        UsageError: the model has fewer positions than `context`.
        DataError: no text has a token to hide.
    """
    require_task(model, "mlm")
    if tokenizer.mask_token_id is None:
        raise UnsupportedModelError("mlm: the tokenizer has no mask token")
    special = set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}
    longest = window_length(model, tokenizer, context)
    sequences = encoded(tokenizer, texts, truncation=True, max_length=longest)
    vocabulary = [token for token in range(len(tokenizer)) if token not in special]
    masked = {
        index: _hide(ids, special, vocabulary, tokenizer.mask_token_id, (seed, index), probability)
        for index, ids in enumerate(sequences)
        if not special.issuperset(ids)
    }
    if not masked:
        raise DataError("no text has a token that could be hidden")
    numbers = list(masked)
    pad_id = padding_id(model, tokenizer)
    batches = []
    for rows in length_bucketed([len(sequences[i]) for i in numbers], batch_tokens):
        chosen = tuple(numbers[row] for row in rows)
        ids, mask = pad([masked[i][0] for i in chosen], pad_id)
        labels, _ = pad([masked[i][1] for i in chosen], IGNORED)
        batches.append(Batch({"input_ids": ids, "attention_mask": mask}, labels, chosen))
    return batches


def _hide(
    ids: Sequence[int],
    special: set[int],
    vocabulary: Sequence[int],
    mask_id: int,
    seed: tuple[int, int],
    probability: float,
) -> tuple[list[int], list[int]]:
    """The ids with some of them hidden, and the labels: the hidden ones, -100 elsewhere."""
    random = np.random.default_rng(seed)
    places = [place for place, token in enumerate(ids) if token not in special]
    chosen = [place for place in places if random.random() < probability]
    chosen = chosen or [places[int(random.integers(len(places)))]]
    hidden, labels = list(ids), [IGNORED] * len(ids)
    for place in chosen:
        labels[place] = ids[place]
        draw = random.random()
        if draw < MASKED_SHARE:
            hidden[place] = mask_id
        elif draw < MASKED_SHARE + RANDOM_SHARE:
            hidden[place] = vocabulary[int(random.integers(len(vocabulary)))]
    return hidden, labels
