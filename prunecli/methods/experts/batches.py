"""Text as batches of forward passes for gate statistics: parallel text of translation models, named texts of others."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from prunecli.architectures.records import Side
from prunecli.errors import DataError
from prunecli.evaluation.decoding import beam_cache, sound_settings
from prunecli.methods.experts.observer import GateObserver, StockObserver
from prunecli.methods.scoring import CollectOptions
from prunecli.model.sparse_layer import SparseLayer
from prunecli.modules.logits import vocabulary_size
from prunecli.results.gates import ANY, Mode, OutputArrays
from prunecli.running.encoding import (
    decoder_inputs,
    filling,
    length_limit,
    padding_id,
    require_task,
    require_tokens,
    window_length,
)
from prunecli.running.layerwise.budget import activation_bytes, state_bytes
from prunecli.running.layerwise.runner import Layerwise
from prunecli.running.runner import BatchCost, Runner
from prunecli.text.batching import length_bucketed, marks_of, masked, pad
from prunecli.text.parallel import ParallelText, pair_name
from prunecli.text.plain import Corpus, token_rows
from prunecli.text.tokens import encode, language_id

Ids = Sequence[int]
"""Token ids of a sentence or window; arrays, because the whole text is in memory."""
Encoded = Callable[[], Tensor]
"""Returns the encoder's output of a batch, `[batch, source tokens, d_model]`."""


DEFAULT: CollectOptions = CollectOptions()


@dataclass(frozen=True)
class Batch:
    """Rows that go through the model together.

    Attributes:
        size: number of units of `Work.total`.
        passes: stack -> its forward passes, each with the name of its sums. A pass is called with a
            function that returns the encoder's output of the batch. A pass of the encoder returns this output, all
            others return None.
        cost: bytes that the batch takes layer by layer.
    """

    size: int
    passes: Mapping[Side, Sequence[tuple[str, Callable[[Encoded], Any]]]]
    cost: Callable[[Layerwise], BatchCost]


@dataclass(frozen=True)
class Work:
    """Batches of a text for one model.

    Attributes:
        observer: observes the modules during the passes.
        entries: name of an entry of the statistics -> names of the sums to add up for it.
        total: units in all batches, for the progress.
        unit: name of these units.
        batches: all batches, in an order that depends on the text and the options alone.
    """

    observer: GateObserver | StockObserver
    entries: Mapping[str, Sequence[str]]
    total: int
    unit: str
    batches: Iterator[Batch]


@dataclass(frozen=True)
class Translation:
    """Parallel text of some pairs of languages.

    The encoder runs once per source sentence, whatever the number of targets; its sums are part of every entry of that
    source.
    """

    text: ParallelText
    pairs: Sequence[tuple[str, str]]
    options: CollectOptions = DEFAULT

    @property
    def mode(self) -> Mode:
        """Mode of the statistics."""
        return self.options.mode

    @property
    def key(self) -> dict[str, Any]:
        """Everything that the sums depend on besides the model and the type."""
        digest = hashlib.sha256()
        for language, lines in self.text.sentences.items():
            digest.update("\n".join((language, *lines, "")).encode())
        return {
            "text": digest.hexdigest(),
            "pairs": [list(pair) for pair in self.pairs],
            **self.options.values_of(CollectOptions),
        }

    def work(self, runner: Runner, layers: Sequence[SparseLayer], tokenizer: Any) -> Work:
        """The batches for a runner's model.

        Raises:
            DataError: a language that the tokenizer lacks.
            CheckpointError: an impossible value in config.json.
        """
        model, observer = runner.model, GateObserver(layers)
        require_task(model, "translation")
        for language in dict.fromkeys(name for pair in self.pairs for name in pair):
            language_id(tokenizer, language)

        def padded(rows: Sequence[Ids]) -> list[Tensor]:
            """Ids and mask `[batch, tokens]`."""
            return [tensor.to(runner.device) for tensor in pad(rows, padding_id(model, tokenizer))]

        def run_encoder(sources: Sequence[Ids], _encoded: Encoded) -> Any:
            ids, mask = padded(sources)
            return model.get_encoder()(input_ids=ids, attention_mask=mask).last_hidden_state

        def decode(sources: Sequence[Ids], target: str, labels: Sequence[Ids], encoded: Encoded) -> None:
            """Run the decoder on the reference (teacher forcing), or translate with beam search."""
            mask, config = padded(sources)[1], model.config
            if self.mode == "forced":
                # Start token, then all labels but the last.
                ids, labels_mask = padded([[int(config.decoder_start_token_id), *row[:-1]] for row in labels])
                # The output layer's product is left out: routing does not need it.
                model.get_decoder()(
                    input_ids=ids,
                    attention_mask=labels_mask,
                    encoder_hidden_states=encoded(),
                    encoder_attention_mask=mask,
                    use_cache=False,
                )
                return
            from transformers.modeling_outputs import MoEModelOutput

            positions = int(config.max_position_embeddings)
            longest = torch.tensor([length_limit(n, positions) for n in mask.sum(dim=1).tolist()])
            with observer.searching(model, longest.to(mask.device)), sound_settings(model):
                model.generate(
                    # generate changes this object: a new one for each target
                    encoder_outputs=MoEModelOutput(last_hidden_state=encoded()),
                    attention_mask=mask,
                    forced_bos_token_id=language_id(tokenizer, target, config.vocab_size),
                    num_beams=self.options.beam,
                    do_sample=False,
                    max_new_tokens=int(longest.max()),
                    max_length=None,
                    **beam_cache(model),
                )

        def batches() -> Iterator[Batch]:
            for source, sources, targets in self._rows(model.config, tokenizer):
                passes: dict[Side, Any] = {
                    "encoder": [(pair_name(source, ANY), partial(run_encoder, sources))],
                    "decoder": [
                        (pair_name(source, target), partial(decode, sources, target, labels))
                        for target, labels in targets.items()
                    ],
                }
                cost = partial(_translation_cost, sources, targets)
                yield Batch(len(sources) * len(targets), passes, cost)

        return Work(
            observer,
            {pair_name(*pair): (pair_name(pair[0], ANY), pair_name(*pair)) for pair in self.pairs},
            len(self.text) * len(self.pairs),
            "sentences",
            batches(),
        )

    def _rows(self, config: Any, tokenizer: Any) -> Iterator[tuple[str, list[Ids], dict[str, list[Ids]]]]:
        """Source, ids of its sentences, and ids of the same sentences in each target, batch by batch."""
        bounds = {"max_length": config.max_position_embeddings - 1, "vocabulary": config.vocab_size}
        rows: dict[str, list[Ids]] = {}  # as targets, which several sources share

        def ids_of(language: str, as_target: bool) -> list[Ids]:
            found = encode(tokenizer, self.text.sentences[language], language, as_target=as_target, **bounds)
            return [array("i", ids) for ids in found]

        for source in dict.fromkeys(pair[0] for pair in self.pairs):
            sources = ids_of(source, False)
            targets = [target for name, target in self.pairs if name == source]
            rows |= {target: ids_of(target, True) for target in targets if target not in rows}
            lengths = [
                (len(ids), max(len(rows[target][row]) for target in targets))
                for row, ids in enumerate(sources)
            ]
            for batch in length_bucketed(lengths, self.options.batch_tokens):
                labels = {target: [rows[target][row] for row in batch] for target in targets}
                yield source, [sources[row] for row in batch], labels


def _translation_cost(
    sources: Sequence[Ids], targets: Mapping[str, Sequence[Ids]], runner: Layerwise
) -> BatchCost:
    """Memory of a batch: the states while the encoder runs; its output and the states while the decoder runs."""
    shape, sentences = runner.shape, len(sources)

    def states(rows: Sequence[Ids]) -> int:
        return state_bytes(shape, sentences * max(map(len, rows)), sum(map(len, rows)))

    keys = max(map(len, sources))
    lengths = (keys, *(max(map(len, labels)) for labels in targets.values()))
    output = sentences * keys * shape.d_model * shape.itemsize
    return BatchCost(
        max(activation_bytes(shape, sentences, length, keys) for length in lengths),
        (states(sources) + output, output + sum(map(states, targets.values()))),
    )


@dataclass(frozen=True)
class Texts:
    """Named texts, each an entry of its own.

    Each batch of windows goes once through the model, without its output layer, on which no routing depends. If the
    model is an encoder-decoder, the masked windows go through the encoder and the masked tokens through the decoder.

    Attributes:
        outputs: see `StockObserver`.
    """

    corpora: Sequence[Corpus]
    options: CollectOptions = DEFAULT
    mode: Mode = "text"
    outputs: OutputArrays | None = None

    @property
    def key(self) -> dict[str, Any]:
        """Everything that the sums depend on besides the model and the type."""
        return {
            "texts": [[corpus.name, corpus.sha256] for corpus in self.corpora],
            **self.options.values_of(CollectOptions),
        }

    def work(self, runner: Runner, layers: Sequence[SparseLayer], tokenizer: Any) -> Work:
        """The batches for a runner's model.

        Raises:
            UnsupportedModelError: neither a language model nor a model that restores masked text.
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
        padding, equal = filling(model, tokenizer)
        observer = StockObserver(layers, self.outputs)

        def read(name: str, rows: Sequence[Ids], _encoded: Encoded) -> None:
            observer.text = name
            if marks is None:
                ids, mask = pad(rows, padding)
                given = None if bool(mask.all()) else mask.to(device)
                with observer.reading(given):
                    model.base_model(input_ids=ids.to(device), attention_mask=given, use_cache=False)
                return
            inputs, targets = zip(*(masked(row, marks) for row in rows), strict=True)
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

        def batches() -> Iterator[Batch]:
            for name, own in windows.items():
                for numbers in length_bucketed([*map(len, own)], self.options.batch_tokens, equal=equal):
                    rows = [own[number] for number in numbers]

                    def cost(
                        runner: Layerwise, count: int = len(rows), longest: int = len(rows[0])
                    ) -> BatchCost:
                        tokens = count * longest
                        return BatchCost(
                            activation_bytes(runner.shape, count, longest, longest),
                            (state_bytes(runner.shape, tokens, tokens),),
                        )

                    yield Batch(sum(map(len, rows)), {"decoder": [(name, partial(read, name, rows))]}, cost)

        return Work(
            observer,
            {name: (name,) for name in windows},
            sum(len(window) for own in windows.values() for window in own),
            "tokens",
            batches(),
        )


def text_windows(
    tokenizer: Any,
    corpus: Corpus,
    length: int,
    max_tokens: int | None = None,
    vocabulary: int | None = None,
) -> list[Ids]:
    """Windows of at most `length` tokens of each document, without overlap.

    So every token is routed once. The tokens that the tokenizer adds to a text (a start token) are included, as in the
    model's training.

    Args:
        max_tokens: largest number of tokens of the corpus; the last window is cut there.
        vocabulary: rows of the model's table. If None, any id is accepted.

    Raises:
        DataError: there is no token.
        CheckpointError: the table has no row for a token.
    """
    windows: list[Ids] = []
    left = max_tokens
    for ids in token_rows(tokenizer, corpus, vocabulary):
        row = array("i", ids[:left])
        windows += [row[start : start + length] for start in range(0, len(row), length)]
        if left is not None and (left := left - len(row)) <= 0:
            break
    if not windows:
        raise DataError(f"{', '.join(map(str, corpus.files))}: no token in the text {corpus.name!r}")
    return windows
