"""Named texts, and how a language model is run over them for gate statistics."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prunecli.architectures.records import Side
from prunecli.errors import DataError, UsageError
from prunecli.methods.experts.score import DEFAULT, CollectOptions, Entry, Sums, incomplete
from prunecli.methods.experts.stock_observer import StockObserver
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.sparse_layer import SparseLayer
from prunecli.modules.stock_model import refused_by_layer
from prunecli.modules.stock_names import REMEDY
from prunecli.results.gate_sums import TEXT_SUMS, GateSums, Mode
from prunecli.running.encoding import (
    decoder_inputs,
    depends_on_padding,
    padding_id,
    require_task,
    require_tokens,
)
from prunecli.running.layerwise.budget import stock_activation_bytes, stock_state_bytes
from prunecli.running.layerwise.runner import Layerwise
from prunecli.running.lengths import vocabulary_size, window_length
from prunecli.running.runner import Advance, BatchCost, Run, Runner
from prunecli.text.batching import length_bucketed, pad
from prunecli.text.corpus import Corpus, token_rows
from prunecli.text.denoising import Marks, marks_of, masked

Window = Sequence[int]
"""Token ids; arrays, since a text is held as a whole."""


@dataclass(frozen=True)
class Texts:
    """Texts, each an entry of its own. A `Material`."""

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

    def passes(self, runner: Runner, layers: Sequence[SparseLayer], tokenizer: Any) -> TextPasses:
        """See `Material`.

        Raises:
            UnsupportedModelError: not a language model, nor one that restores masked text.
            UsageError: the model has fewer positions than the context.
            DataError: a text without tokens, or a chat that the tokenizer cannot take.
        """
        restores = bool(runner.model.config.is_encoder_decoder)
        require_task(runner.model, "translation" if restores else "lm")
        marks = marks_of(tokenizer) if restores else None
        if marks is not None:
            require_tokens(tokenizer, runner.model, [marks.sentinels])
        length = window_length(runner.model, tokenizer, self.options.context)
        vocabulary = vocabulary_size(runner.model.config)
        windows = {
            corpus.name: text_windows(tokenizer, corpus, length, self.options.max_tokens, vocabulary)
            for corpus in self.corpora
        }
        padding = padding_id(runner.model, tokenizer)
        observer = StockObserver(layers, self.outputs)
        given = runner, windows, self.options.batch_tokens, padding, observer
        return TextPasses(*given) if marks is None else DenoisingPasses(*given, marks)


@dataclass(frozen=True)
class TextBatch:
    """Windows of one text."""

    name: str
    windows: Sequence[Window]

    @property
    def tokens(self) -> int:
        """Of all windows, without padding."""
        return sum(map(len, self.windows))


@dataclass(frozen=True)
class TextPasses:
    """Each batch of windows once through the model, without its output layer, on which no routing depends. `Passes`.

    Attributes:
        windows: of each text.
        batch_tokens: padded tokens of a batch.
        padding: id that fills up rows.
    """

    runner: Runner
    windows: Mapping[str, Sequence[Window]]
    batch_tokens: int
    padding: int
    observer: StockObserver
    names = TEXT_SUMS
    unit = "tokens"

    @property
    def total(self) -> int:
        """See `Passes`."""
        return sum(len(window) for windows in self.windows.values() for window in windows)

    def batches(self) -> Iterator[TextBatch]:
        """See `Passes`."""
        equal = depends_on_padding(self.runner.model)
        for name, windows in self.windows.items():
            for rows in length_bucketed([len(window) for window in windows], self.batch_tokens, equal=equal):
                yield TextBatch(name, [windows[row] for row in rows])

    def size(self, batch: TextBatch) -> int:
        """See `Passes`."""
        return batch.tokens

    def cost(self, runner: Layerwise, batch: TextBatch) -> BatchCost:
        """See `Passes`."""
        rows, length = len(batch.windows), max(map(len, batch.windows))
        return BatchCost(
            stock_activation_bytes(runner.shape, rows, length),
            (stock_state_bytes(runner.shape, rows * length),),
        )

    def steps(self, batches: Sequence[TextBatch]) -> Mapping[Side, int]:
        """See `Passes`."""
        return {"decoder": len(batches)}

    def run(self, run: Run, batches: Sequence[TextBatch], sums: Sums, advance: Advance) -> None:
        """See `Passes`."""
        if run.restored is not None:
            sums.restore(run.restored)
        run.forward(
            [partial(self._read, batch) for batch in batches],
            observer=self.observer,
            reduce=partial(sums.add, [[(batch.name,)] for batch in batches]),
            finish=lambda number, _output: advance(batches[number].tokens),
            keeping=sums.kept,
        )

    def entries(self, sums: Mapping[Entry, GateSums]) -> dict[str, GateSums]:
        """See `Passes`."""
        for name in self.windows:
            if (name,) not in sums:
                raise incomplete(name)
        return {name: sums[name,] for name in self.windows}

    def _read(self, batch: TextBatch) -> None:
        self.observer.text = batch.name
        ids, mask = pad(batch.windows, self.padding)
        given: Tensor | None = None if bool(mask.all()) else mask.to(self.runner.device)
        model = self.runner.model
        with self.observer.reading(given):
            model.base_model(
                input_ids=ids.to(self.runner.device, torch.int64), attention_mask=given, use_cache=False
            )


@dataclass(frozen=True)
class DenoisingPasses(TextPasses):
    """Each batch of windows once, masked, through the encoder, and what was masked through the decoder. `Passes`.

    Attributes:
        marks: what stands for masked spans.
    """

    marks: Marks

    def _read(self, batch: TextBatch) -> None:
        self.observer.text = batch.name
        model, device = self.runner.model, self.runner.device
        inputs, targets = zip(*(masked(window, self.marks) for window in batch.windows), strict=True)
        (ids, mask), (labels, labels_mask) = (
            tuple(tensor.to(device) for tensor in pad(rows, self.padding)) for rows in (inputs, targets)
        )
        with self.observer.reading(labels_mask, mask):
            model.base_model(
                input_ids=ids,
                attention_mask=mask,
                decoder_input_ids=decoder_inputs(model, labels),
                use_cache=False,
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
        row = array("i", ids if left is None else ids[:left])
        windows += [row[start : start + length] for start in range(0, len(row), length)]
        if left is not None and (left := left - len(row)) <= 0:
            break
    if not windows:
        raise DataError(f"{', '.join(map(str, corpus.files))}: no token in the text {corpus.name!r}")
    return windows
