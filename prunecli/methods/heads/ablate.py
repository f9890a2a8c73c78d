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
from torch.nn import functional

from prunecli.evaluation.decoding import DecodingOptions, batched_search
from prunecli.model.attention import AttentionLayer
from prunecli.model.checkpoint import Checkpoint
from prunecli.modules.attention import masked_heads
from prunecli.modules.pooling import Pooling
from prunecli.modules.replay import recording, replaying, unchanged_below
from prunecli.progress import Progress, silent
from prunecli.results.unit_scores import Method
from prunecli.running.examples import Batch
from prunecli.running.losses import example_losses, require_finite
from prunecli.running.vectors import batch_vectors
from prunecli.text.parallel import ParallelText, pair_name

Example = tuple[str, int]
"""What a message calls the text, and the example's number in it."""
Outcome = Any
"""Of an example: its loss, 1 or 0 for right or wrong, or its translation."""


@dataclass(frozen=True)
class HeadMask:
    """Some heads of one attention masked.

    Attributes:
        layer: the attention.
        values: xi_h (2.3) of each head that it holds: 0 removes it.
    """

    layer: AttentionLayer
    values: tuple[float, ...]


@dataclass(frozen=True)
class Measurement:
    """What is measured of one batch.

    Attributes:
        examples: of the batch.
        run: gives the outcome of each with the model as it is at the time.
        decodes: it calls the decoder step by step, so that only the encoder can be shared.
    """

    examples: tuple[Example, ...]
    run: Callable[[], list[Outcome]]
    decodes: bool = False


def masks_of(layers: Sequence[AttentionLayer], method: Method) -> list[HeadMask]:
    """Of each head in turn, in the order of `layers`: the model without it (3.2), or it alone in its layer (3.3)."""
    alone = method == "all-but-one"
    return [
        HeadMask(layer, tuple(float((other == head) == alone) for other in range(layer.num_heads)))
        for layer in layers
        for head in range(layer.num_heads)
    ]


def measure_masked(
    checkpoint: Checkpoint,
    model: Any,
    measurements: Sequence[Measurement],
    masks: Sequence[HeadMask],
    progress: Progress = silent,
) -> tuple[list[Example], list[list[Outcome]]]:
    """Run every measurement with the whole model and with each mask.

    Args:
        model: what `load_model` made of `checkpoint`.

    Returns:
        The examples, sorted, and their outcomes `[1 + masks][examples]`, first those of the whole model.
    """
    layers = checkpoint.layout.own_attentions
    whole: dict[Example, Outcome] = {}
    masked: list[dict[Example, Outcome]] = [{} for _ in masks]
    total = sum(len(measurement.examples) for measurement in measurements) * (1 + len(masks))
    with torch.inference_mode(), progress("running without heads", total, "examples") as advance:
        for measurement in measurements:
            below = unchanged_below(model, checkpoint, decoder=not measurement.decodes)
            needed = dict.fromkeys(name for mask in masks for name in below[mask.layer.name])
            with recording(model, needed) as kept:
                whole.update(zip(measurement.examples, measurement.run(), strict=True))
            advance(len(measurement.examples))
            for outcomes, mask in zip(masked, masks, strict=True):
                shared = {name: kept[name] for name in below[mask.layer.name]}
                values = {mask.layer.name: torch.tensor(mask.values)}
                with replaying(model, shared), masked_heads(model, layers, values):
                    outcomes.update(zip(measurement.examples, measurement.run(), strict=True))
                advance(len(measurement.examples))
    examples = sorted(whole)
    return examples, [[outcomes[example] for example in examples] for outcomes in (whole, *masked)]


def loss_measurements(model: Any, batches: Mapping[str, Sequence[Batch]]) -> list[Measurement]:
    """Each example's mean token loss; `batches`: what a message calls their text -> batches."""
    return _measurements(batches, partial(_losses, model))


def cosine_measurements(
    model: Any, batches: Mapping[str, Sequence[Batch]], pooling: Pooling
) -> list[Measurement]:
    """The cosine of each text's vector and that of the model as it is now."""
    whole: dict[int, torch.Tensor] = {}
    with torch.inference_mode():
        for of_text in batches.values():
            whole |= {id(batch): batch_vectors(model, pooling, batch) for batch in of_text}

    def run(batch: Batch, _text: str) -> list[Outcome]:
        vectors = batch_vectors(model, pooling, batch)
        near: list[float] = functional.cosine_similarity(vectors, whole[id(batch)]).tolist()
        return near

    return _measurements(batches, run)


def accuracy_measurements(model: Any, batches: Mapping[str, Sequence[Batch]]) -> list[Measurement]:
    """1 for each example whose class the model chooses, 0 for others."""
    return _measurements(batches, partial(_right, model))


def _measurements(
    batches: Mapping[str, Sequence[Batch]], run: Callable[[Batch, str], list[Outcome]]
) -> list[Measurement]:
    return [
        Measurement(tuple((text, index) for index in batch.indices), partial(run, batch, text))
        for text, of_text in batches.items()
        for batch in of_text
    ]


def _losses(model: Any, batch: Batch, text: str) -> list[float]:
    losses = example_losses(model, batch)
    require_finite(losses, batch, text)
    values: list[float] = losses.tolist()
    return values


def _right(model: Any, batch: Batch, _text: str) -> list[float]:
    logits = model(**batch.arguments(model)).logits
    right: list[float] = (logits.argmax(dim=-1).cpu() == batch.labels).double().tolist()
    return right


def translation_measurements(
    model: Any, tokenizer: Any, text: ParallelText, pair: tuple[str, str], options: DecodingOptions
) -> list[Measurement]:
    """The translation of each sentence of `pair[0]` into `pair[1]`, by beam search.

    Raises:
        DataError: the tokenizer lacks a language.
    """
    batches, search = batched_search(model, tokenizer, text.sentences[pair[0]], pair, options)

    def run(rows: Sequence[int]) -> list[str]:
        return [line.strip() for line in tokenizer.batch_decode(search(rows), skip_special_tokens=True)]

    name = pair_name(*pair)
    return [
        Measurement(tuple((name, index) for index in rows), partial(run, rows), decodes=True)
        for rows in batches
    ]
