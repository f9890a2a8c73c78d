"""Measure: the score of a model without each head (1905.10650, 3.2), or with one head of a layer alone (3.3).

The model is loaded once. What a removal leaves as it was is computed once per batch: the layers below an attention and,
for one of the decoder, the encoder. A beam search shares the encoder alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from prunecli.evaluation.decoding import DecodingOptions, generate, generation_settings
from prunecli.model.attention import AttentionLayer
from prunecli.model.checkpoint import Checkpoint
from prunecli.modules.attention import masked_heads
from prunecli.modules.replay import Outputs, recording, replaying, unchanged_below
from prunecli.progress import Progress, silent
from prunecli.running.examples import Batch
from prunecli.running.lengths import length_limit, max_positions
from prunecli.running.losses import example_losses, require_finite
from prunecli.text.batching import length_bucketed
from prunecli.text.parallel import ParallelText, pair_name
from prunecli.text.tokens import encode

Example = tuple[str, int]
"""What a message calls the text, and the example's number in it."""
Outcome = Any
"""What is found of an example: a loss, 1 or 0 for right or wrong, a translation."""


@dataclass(frozen=True)
class Variant:
    """The model with some heads of one attention masked.

    Attributes:
        layer: the attention.
        mask: xi_h (2.3) of each head that it holds: 0 removes it.
    """

    layer: AttentionLayer
    mask: tuple[float, ...]


@dataclass(frozen=True)
class Piece:
    """One batch of the work.

    Attributes:
        examples: which.
        run: gives the outcome of each with the model as it is at the time.
        decodes: it calls the decoder step by step, so that only the encoder can be shared.
    """

    examples: tuple[Example, ...]
    run: Callable[[], list[Outcome]]
    decodes: bool = False


def without_each(layers: Sequence[AttentionLayer]) -> list[Variant]:
    """The model without each head in turn (3.2), in the order of `layers`."""
    return [
        Variant(layer, tuple(float(other != head) for other in range(layer.num_heads)))
        for layer in layers
        for head in range(layer.num_heads)
    ]


def only_each(layers: Sequence[AttentionLayer]) -> list[Variant]:
    """The model with each head in turn alone in its layer (3.3)."""
    return [
        Variant(layer, tuple(float(other == head) for other in range(layer.num_heads)))
        for layer in layers
        for head in range(layer.num_heads)
    ]


def outcomes(
    checkpoint: Checkpoint,
    model: Any,
    pieces: Sequence[Piece],
    variants: Sequence[Variant],
    progress: Progress = silent,
) -> tuple[list[Example], list[list[Outcome]]]:
    """Run every piece with the whole model and with each variant.

    Args:
        model: what `load_model` made of `checkpoint`.

    Returns:
        The examples, sorted, and their outcomes: those of the whole model, then those of each variant.
    """
    layers = checkpoint.layout.attentions
    found: list[dict[Example, Outcome]] = [{} for _ in range(1 + len(variants))]
    total = sum(len(piece.examples) for piece in pieces) * len(found)
    with torch.inference_mode(), progress("running without heads", total, "examples") as advance:
        for piece in pieces:
            below = unchanged_below(model, checkpoint, decoder=not piece.decodes)
            needed = dict.fromkeys(name for variant in variants for name in below[variant.layer.name])
            with recording(model, needed) as kept:
                found[0].update(zip(piece.examples, piece.run(), strict=True))
            advance(len(piece.examples))
            for place, variant in zip(found[1:], variants, strict=True):
                shared = {name: kept[name] for name in below[variant.layer.name]}
                place.update(zip(piece.examples, _run(model, layers, variant, piece, shared), strict=True))
                advance(len(piece.examples))
    examples = sorted(found[0])
    return examples, [[by_example[example] for example in examples] for by_example in found]


def _run(
    model: Any, layers: Sequence[AttentionLayer], variant: Variant, piece: Piece, shared: Outputs
) -> list[Outcome]:
    mask = {variant.layer.name: torch.tensor(variant.mask)}
    with replaying(model, shared), masked_heads(model, layers, mask):
        return piece.run()


def loss_pieces(model: Any, batches: Mapping[str, Sequence[Batch]]) -> list[Piece]:
    """Each example's mean token loss; `batches`: what a message calls their text -> batches."""
    return _pieces(batches, lambda batch, text: _losses(model, batch, text))


def accuracy_pieces(model: Any, batches: Mapping[str, Sequence[Batch]]) -> list[Piece]:
    """1 for each example whose class the model finds, 0 for others."""
    return _pieces(batches, lambda batch, _text: _right(model, batch))


def _pieces(
    batches: Mapping[str, Sequence[Batch]], run: Callable[[Batch, str], list[Outcome]]
) -> list[Piece]:
    return [
        Piece(tuple((text, index) for index in batch.indices), partial(run, batch, text))
        for text, found in batches.items()
        for batch in found
    ]


def _losses(model: Any, batch: Batch, text: str) -> list[float]:
    losses = example_losses(model, batch)
    require_finite(losses, batch, text)
    found: list[float] = losses.tolist()
    return found


def _right(model: Any, batch: Batch) -> list[float]:
    logits = model(**batch.arguments(model)).logits
    right: list[float] = (logits.argmax(dim=-1).cpu() == batch.labels).double().tolist()
    return right


def translation_pieces(
    model: Any, tokenizer: Any, text: ParallelText, pair: tuple[str, str], options: DecodingOptions
) -> list[Piece]:
    """The translation of each sentence of `pair[0]` into `pair[1]`, by beam search.

    Raises:
        DataError: the tokenizer lacks a language.
    """
    sources = encode(tokenizer, text.sentences[pair[0]], pair[0], max_length=max_positions(model.config))
    settings = generation_settings(tokenizer, pair[1], options.beam)

    def run(rows: Sequence[int]) -> list[str]:
        limit = options.max_new_tokens or length_limit(len(sources[rows[0]]), max_positions(model.config))
        made = generate(model, [sources[i] for i in rows], tokenizer.pad_token_id, settings, limit)
        return [found.strip() for found in tokenizer.batch_decode(made, skip_special_tokens=True)]

    name = pair_name(*pair)
    return [
        Piece(tuple((name, index) for index in rows), partial(run, rows), decodes=True)
        for rows in length_bucketed([len(source) for source in sources], options.batch_tokens)
    ]
