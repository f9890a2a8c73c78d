"""Named texts, and how a language model is run over them for gate statistics."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prunecli.errors import DataError, UsageError
from prunecli.methods.experts.observer import StockObserver
from prunecli.methods.experts.score import DEFAULT, CollectOptions, Passes, Sums
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.sparse_layer import SparseLayer
from prunecli.modules.stock_model import refused_by_layer
from prunecli.modules.stock_names import REMEDY
from prunecli.results.gates import Mode
from prunecli.running.encoding import (
    decoder_inputs,
    depends_on_padding,
    padding_id,
    require_task,
    require_tokens,
)
from prunecli.running.layerwise.budget import activation_bytes, state_bytes
from prunecli.running.layerwise.runner import Layerwise
from prunecli.running.lengths import vocabulary_size, window_length
from prunecli.running.runner import Advance, BatchCost, Run, Runner
from prunecli.text.batching import length_bucketed, pad
from prunecli.text.corpus import Corpus, token_rows
from prunecli.text.denoising import marks_of, masked

Window = Sequence[int]
"""Token ids; arrays, since a text is held as a whole."""


@dataclass(frozen=True)
class Texts:
    """Texts, each an entry of its own. A `Material`.

    Each batch of windows goes once through the model, without its output layer, on which no routing depends. Of an
    encoder-decoder model, the windows go masked through the encoder, and what was masked through the decoder.
    """

    corpora: Sequence[Corpus]
    options: CollectOptions = DEFAULT
    mode: Mode = "text"
    outputs: dict[tuple[str, str], NDArray[np.float64]] | None = None
    """See `StockObserver`."""

    @property
    def key(self) -> dict[str, Any]:
        """See `Material`."""
        return {
            "texts": [[corpus.name, corpus.sha256] for corpus in self.corpora],
            "batch_tokens": self.options.batch_tokens,
            "context": self.options.context,
            "max_tokens": self.options.max_tokens,
        }

    def whole(self, checkpoint: Checkpoint) -> UsageError | None:
        """See `Material`."""
        refused = refused_by_layer(checkpoint)
        return None if refused is None else UsageError(f"--memory: {refused}", REMEDY)

    def layers(self, checkpoint: Checkpoint) -> tuple[SparseLayer, ...]:
        """See `Material`."""
        return tuple(layer for layer in checkpoint.require_mixtures() if not layer.is_predicting)

    def passes(self, runner: Runner, layers: Sequence[SparseLayer], tokenizer: Any) -> Passes:
        """See `Material`.

        Raises:
            UnsupportedModelError: not a language model, nor one that restores masked text.
            UsageError: the model has fewer positions than the context.
            DataError: a text without tokens, or a chat that the tokenizer cannot take.
        """
        model, device = runner.model, runner.device
        restores = bool(model.config.is_encoder_decoder)
        require_task(model, "translation" if restores else "lm")
        marks = marks_of(tokenizer) if restores else None
        if marks is not None:
            require_tokens(tokenizer, model, [marks.sentinels])
        length = window_length(model, tokenizer, self.options.context)
        vocabulary = vocabulary_size(model.config)
        windows = {
            corpus.name: text_windows(tokenizer, corpus, length, self.options.max_tokens, vocabulary)
            for corpus in self.corpora
        }
        padding, equal = padding_id(model, tokenizer), depends_on_padding(model)
        observer = StockObserver(layers, self.outputs)

        def read(batch: TextBatch) -> None:
            observer.text = batch.name
            if marks is None:
                ids, mask = pad(batch.windows, padding)
                given = None if bool(mask.all()) else mask.to(device)
                with observer.reading(given):
                    model.base_model(input_ids=ids.to(device), attention_mask=given, use_cache=False)
                return
            inputs, targets = zip(*(masked(window, marks) for window in batch.windows), strict=True)
            (ids, mask), (labels, labels_mask) = (
                [tensor.to(device) for tensor in pad(rows, padding)] for rows in (inputs, targets)
            )
            with observer.reading(labels_mask, mask):
                model.base_model(
                    input_ids=ids,
                    attention_mask=mask,
                    decoder_input_ids=decoder_inputs(model, labels),
                    use_cache=False,
                )

        def run(run: Run, batches: Sequence[TextBatch], sums: Sums, advance: Advance) -> None:
            if run.restored is not None:
                sums.restore(run.restored)
            run.forward(
                [partial(read, batch) for batch in batches],
                observer=observer,
                reduce=partial(sums.add, [[(batch.name,)] for batch in batches]),
                finish=lambda number, _output: advance(batches[number].size),
                keeping=sums.kept,
            )

        return Passes(
            observer,
            {name: ((name,),) for name in windows},
            sum(len(window) for own in windows.values() for window in own),
            "tokens",
            (
                TextBatch(name, [own[row] for row in rows])
                for name, own in windows.items()
                for rows in length_bucketed([*map(len, own)], self.options.batch_tokens, equal=equal)
            ),
            lambda batches: {"decoder": len(batches)},
            run,
        )


@dataclass(frozen=True)
class TextBatch:
    """Windows of one text."""

    name: str
    windows: Sequence[Window]

    @property
    def size(self) -> int:
        """Tokens of all windows, without padding."""
        return sum(map(len, self.windows))

    def cost(self, runner: Layerwise) -> BatchCost:
        """What it takes layer by layer."""
        rows, length = len(self.windows), max(map(len, self.windows))
        return BatchCost(
            activation_bytes(runner.shape, rows, length, length),
            (state_bytes(runner.shape, rows * length, rows * length),),
        )


def text_windows(
    tokenizer: Any,
    corpus: Corpus,
    length: int,
    max_tokens: int | None = None,
    vocabulary: int | None = None,
) -> list[Window]:
    """Each document cut into stretches of `length` tokens that do not overlap, the last one what is left.

    So every token is routed once. What the tokenizer puts around a text (a start token) is there as the model was
    trained with it.

    Args:
        max_tokens: of the corpus; the window that would be beyond it is cut.
        vocabulary: rows of the model's table; None: any id will do.

    Raises:
        DataError: there is no token.
        CheckpointError: the table has no row for one.
    """
    windows: list[Window] = []
    left = max_tokens
    for ids in token_rows(tokenizer, corpus, vocabulary):
        row = array("i", ids[:left])
        windows += [row[start : start + length] for start in range(0, len(row), length)]
        if left is not None and (left := left - len(row)) <= 0:
            break
    if not windows:
        raise DataError(f"{', '.join(map(str, corpus.files))}: no token in the text {corpus.name!r}")
    return windows
