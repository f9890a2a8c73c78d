"""Text as batches of forward passes for gate statistics: parallel text of translation models, named texts of others.

Observers see what a mixture of experts does in a pass: sums over its real tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from prunecli.architectures.records import Side
from prunecli.errors import DataError, PruneError, UnsupportedModelError
from prunecli.evaluation.decoding import generate
from prunecli.methods.scoring import CollectOptions
from prunecli.model.sparse_layer import SparseLayer
from prunecli.modules.loading import sparse_ffns
from prunecli.modules.logits import vocabulary_size
from prunecli.modules.stock_experts import ExpertUse
from prunecli.modules.tapped_experts import observed_experts
from prunecli.private import UNFINISHED
from prunecli.results.gates import ANY, COUNTS, SUMS, TEXT_SUMS, GateSums, Mode, OutputArrays
from prunecli.running.batches import batch_cost
from prunecli.running.encoding import (
    decoder_inputs,
    filling,
    length_limit,
    output_language,
    padding_id,
    require_task,
    require_tokens,
    window_length,
)
from prunecli.running.examples import Batch as TokenBatch
from prunecli.running.examples import Sequences, TokenExamples
from prunecli.running.layerwise.runner import Layerwise, Runner
from prunecli.running.runner import BatchCost
from prunecli.text.batching import length_bucketed, marks_of, masked
from prunecli.text.parallel import ParallelText, pair_name
from prunecli.text.plain import Corpus, token_rows
from prunecli.text.tokens import encode, language_id

Ids = Sequence[int]
"""Token ids of a sentence or window; arrays, because the whole text is in memory."""
Encoded = Callable[[], Tensor]
"""Returns the encoder's output of a batch, `[batch, source tokens, d_model]`."""
Made = Callable[[], TokenBatch]
"""Makes the tensors of a batch anew for each pass: a group's batches may have millions of tokens."""

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
        return {
            "text": self.text.sha256,
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

        config, padding = model.config, padding_id(model, tokenizer)
        shift = partial(decoder_inputs, model)

        def run_encoder(batch: Made, _encoded: Encoded) -> Any:
            inputs = batch().arguments(model)
            ids, mask = inputs["input_ids"], inputs["attention_mask"]
            return model.get_encoder()(input_ids=ids, attention_mask=mask).last_hidden_state

        def decode(batch: Made, target: str, encoded: Encoded) -> None:
            """Run the decoder on the reference (teacher forcing), or translate with beam search."""
            inputs = batch().arguments(model)
            if self.mode == "forced":
                # The output layer's product is left out: routing does not need it.
                model.get_decoder()(
                    input_ids=inputs["decoder_input_ids"],
                    attention_mask=inputs["decoder_attention_mask"],
                    encoder_hidden_states=encoded(),
                    encoder_attention_mask=inputs["attention_mask"],
                    use_cache=False,
                )
                return
            from transformers.modeling_outputs import MoEModelOutput

            real = zip(inputs["input_ids"], inputs["attention_mask"].bool(), strict=True)
            sources = [ids[mask].tolist() for ids, mask in real]
            longest = [length_limit(len(row), config.max_position_embeddings) for row in sources]
            with observer.searching(model, torch.tensor(longest, device=runner.device)):
                generate(
                    model,
                    sources,
                    padding,
                    self.options.beam,
                    max(longest),
                    # generate changes this object: a new one for each target
                    encoder_outputs=MoEModelOutput(last_hidden_state=encoded()),
                    **output_language(tokenizer, model, target),
                )

        def ids_of(language: str, as_target: bool) -> Sequences:
            found = encode(
                tokenizer,
                self.text.sentences[language],
                language,
                as_target=as_target,
                max_length=config.max_position_embeddings - 1,
                vocabulary=config.vocab_size,
            )
            return Sequences(found)

        def batches() -> Iterator[Batch]:
            labels: dict[str, Sequences] = {}  # which several sources share
            for source in dict.fromkeys(pair[0] for pair in self.pairs):
                sources, examples = ids_of(source, False), dict[str, TokenExamples]()
                for target in (target for name, target in self.pairs if name == source):
                    if target not in labels:
                        labels[target] = ids_of(target, True)
                    examples[target] = TokenExamples(sources, labels[target], padding, shift=shift)
                every = [sources.lengths, *(labels[target].lengths for target in examples)]
                lengths = [(length, max(others)) for length, *others in zip(*every, strict=True)]
                for rows in length_bucketed(lengths, self.options.batch_tokens):
                    made = {target: partial(own.batch, rows) for target, own in examples.items()}
                    cost = partial(_translation_cost, [[own[row] for row in rows] for own in every])
                    first = next(iter(made.values()))
                    passes: dict[Side, Any] = {
                        "encoder": [(pair_name(source, ANY), partial(run_encoder, first))],
                        "decoder": [
                            (pair_name(source, target), partial(decode, batch, target))
                            for target, batch in made.items()
                        ],
                    }
                    yield Batch(len(rows) * len(made), passes, cost)

        return Work(
            observer,
            {pair_name(*pair): (pair_name(pair[0], ANY), pair_name(*pair)) for pair in self.pairs},
            len(self.text) * len(self.pairs),
            "sentences",
            batches(),
        )


def _translation_cost(lengths: Sequence[Sequence[int]], runner: Layerwise) -> BatchCost:
    """Memory of a batch: the states while the encoder runs; its output and the states while the decoder runs.

    Args:
        lengths: tokens of each sentence of the source, then those of each target.
    """
    shape, (sources, *targets) = runner.shape, lengths

    def states(own: Sequence[int]) -> int:
        return shape.state_bytes(len(own) * max(own), sum(own))

    sentences, keys = len(sources), max(sources)
    output = sentences * keys * shape.d_model * shape.itemsize
    return BatchCost(
        max(shape.activation_bytes(sentences, max(own), keys) for own in lengths),
        (states(sources) + output, output + sum(map(states, targets))),
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
        model = runner.model
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
        observer = StockObserver(layers, self.outputs)

        def examples(own: Sequence[Ids]) -> TokenExamples:
            rows = [(row, row) if marks is None else masked(row, marks) for row in own]
            inputs, labels = map(Sequences, zip(*rows, strict=True))
            shift = None if marks is None else partial(decoder_inputs, model)
            return TokenExamples(inputs, labels, *filling(model, tokenizer), shift=shift)

        def read(name: str, batch: Made, _encoded: Encoded) -> None:
            made = batch()
            mask = made.inputs["attention_mask"]
            observer.begin(name, encoder=mask, decoder=made.inputs.get("decoder_attention_mask", mask))
            model.base_model(**made.arguments(model.base_model))

        def cost(batch: Made, runner: Layerwise) -> BatchCost:
            return batch_cost(runner, batch(), headless=True)

        def batches() -> Iterator[Batch]:
            for name, own in windows.items():
                found, lengths = examples(own), [*map(len, own)]
                for rows in length_bucketed(lengths, self.options.batch_tokens, equal=found.equal):
                    batch = partial(found.batch, rows)
                    passes: dict[Side, Any] = {"decoder": [(name, partial(read, name, batch))]}
                    yield Batch(sum(lengths[row] for row in rows), passes, partial(cost, batch))

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


LayerSums = dict[int, GateSums]
"""Number of a sparse layer -> its sums, of one row."""


class Summing:
    """Sums of the passes since the last `take`, on the model's device, in float64, which counts exactly.

    Args:
        layers: the mixtures of the checkpoint that a forward pass runs.

    Attributes:
        names: names of the sums that `take` returns: of the tokens, and of the rows that `_add` takes.
    """

    names: tuple[str, ...]

    def __init__(self, layers: Sequence[SparseLayer]) -> None:
        self._layers = layers
        self._sums: dict[int, tuple[int, Tensor]] = {}

    def take(self) -> LayerSums:
        """The sums since the last call, `[1]` and `[1, experts]` in original expert ids, of layers that ran.

        Raises:
            PruneError: an expert's output is not finite.
        """
        taken: LayerSums = {}
        if not self._sums:
            return taken
        sums = [sums for _, sums in self._sums.values()]
        # One copy for all layers, because each copy waits for a GPU.
        held = torch.cat([one.to(sums[0].device) for one in sums], dim=1).cpu().numpy()
        for index, (tokens, one) in self._sums.items():
            layer = self._layers[index]
            found, held = np.split(held, [one.shape[1]], axis=1)
            if not np.isfinite(found).all():
                raise PruneError(
                    f"{layer.name}: the output of an expert is not finite",
                    "Compute with `dtype=float32`.",
                )
            taken[index] = row = GateSums.zeros(1, layer.original_experts, self.names)
            row.tokens[0] = tokens
            for name, values in zip(self.names[1:], found, strict=True):
                row[name][0, list(layer.experts)] = np.rint(values) if name in COUNTS else values
        self._sums = {}
        return taken

    def _add(self, index: int, tokens: int, sums: Tensor) -> None:
        """Add `[rows, experts]` of a layer."""
        if index in self._sums:
            counted, before = self._sums[index]
            together = sums + before
            if self.names[-1] == "norm_max":
                together[-1] = torch.maximum(sums[-1], before[-1])
            tokens, sums = tokens + counted, together
        self._sums[index] = tokens, sums


class GateObserver(Summing):
    """Observer that sums what the routers of sparse FFNs do."""

    names = SUMS
    _live: Tensor | None = None

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Observe every sparse FFN of `model` while the block runs."""
        modules = sparse_ffns(model)
        for index, layer in enumerate(self._layers):
            modules[layer.name].observer = partial(self._observe, index)
        try:
            yield
        finally:
            for layer in self._layers:
                modules[layer.name].observer = None

    @contextmanager
    def searching(self, model: Any, longest: Tensor) -> Iterator[None]:
        """While the block runs `model.generate`, count only the beams of unfinished sentences.

        A sentence in a batch is computed until the whole batch is done. Its beams count only as long as the sentence
        would run alone: transformers asks the method `UNFINISHED` once a step whether any sentence can
        still improve; here the same question is answered for each sentence.

        Args:
            longest: `[batch]`, largest number of new tokens of each sentence.
        """
        stock, step = getattr(model, UNFINISHED), 0
        live = self._live = torch.ones_like(longest, dtype=torch.bool)

        def has_unfinished(
            can_improve: Tensor, finished: Tensor, hits: Tensor, early_stopping: bool | str
        ) -> Any:
            nonlocal step
            step += 1
            live.logical_and_(can_improve.reshape(len(live), -1).any(dim=-1) & ~hits.all(dim=-1))
            live.logical_and_(step < longest)
            if early_stopping is True:
                live.logical_and_(~finished.all(dim=-1))
            return stock(can_improve, finished, hits, early_stopping) and bool(live.any())

        setattr(model, UNFINISHED, has_unfinished)
        try:
            yield
        finally:
            self._live = None
            delattr(model, UNFINISHED)

    def _observe(self, index: int, gates: Tensor, experts: Tensor) -> None:
        if self._live is not None:
            beams = self._live.to(gates.device).repeat_interleave(len(gates) // len(self._live))
            rows = beams.nonzero().squeeze(1)
            gates, experts = gates[rows], experts[rows]
        numbers = torch.arange(gates.shape[1], device=gates.device)
        # Masked sums, not scatters: their order, and so their rounding, is fixed on every device.
        ranked = [experts[:, rank : rank + 1] == numbers for rank in range(2)]
        counts = [chosen.sum(dim=0).double() for chosen in ranked]
        weighed = (gates, *(gates.where(chosen, 0.0) for chosen in ranked))
        sums = [one.sum(dim=0, dtype=torch.float64) for one in weighed]
        self._add(index, len(gates), torch.stack(counts + sums))


class StockObserver(Summing):
    """Observer that sums what the experts of a language model do.

    A token's experts are ranked by the weight that the router gives them, equal ones by their number.

    Args:
        layers: see `Summing`.
        outputs: sums of outputs, which passes add to: (text, layer's name) -> `[original experts, width]` float64. If
            None, outputs are not summed.
    """

    names = TEXT_SUMS

    def __init__(self, layers: Sequence[SparseLayer], outputs: OutputArrays | None = None) -> None:
        super().__init__(layers)
        self._outputs = outputs
        self.begin()

    @contextmanager
    def watching(self, model: Any) -> Iterator[None]:
        """Observe the experts of every sparse layer of `model` while the block runs.

        Raises:
            UnsupportedModelError: its modules are not the layers of the checkpoint, or cannot be observed.
        """
        with observed_experts(model) as modules:
            held = [module.num_experts for module in modules.values()]
            if held != [layer.num_experts for layer in self._layers]:
                raise UnsupportedModelError(
                    f"{type(model).__name__} runs {len(held)} layers of experts that can be observed, "
                    f"its checkpoint holds {len(self._layers)}",
                    "Choose experts with prune-experts --keep FILE or --metric random.",
                )
            for index, module in enumerate(modules.values()):
                module.observer = partial(self._observe, index)
            yield

    def begin(self, text: str = "", **masks: Tensor) -> None:
        """Prepare for a pass that reads a text.

        Args:
            masks: side -> `[batch, seq]`, 1 for the tokens that count. Without a mask all tokens of a side count.
        """
        self._text = text
        self._real = {side: mask.reshape(-1).bool() for side, mask in masks.items() if not mask.all()}

    def _observe(self, index: int, use: ExpertUse) -> None:
        experts, weights, norms, routed = use.experts, use.weights.double(), use.norms.double(), use.routed
        layer = self._layers[index]
        mask = self._real.get(layer.side)
        if mask is not None:
            real = mask.to(experts.device)
            experts, weights, norms = experts[real], weights[real], norms[real]
            routed = None if routed is None else routed[real]
        if self._outputs is not None:
            if use.sums is None:
                raise UnsupportedModelError(
                    f"{layer.name}: experts of this kind hand out no outputs", "Leave `mean_outputs` out."
                )
            found, key = use.sums(mask).numpy(), (self._text, layer.name)
            if key not in self._outputs:
                self._outputs[key] = np.zeros((layer.original_experts, found.shape[1]))
            self._outputs[key][np.asarray(layer.experts)] += found
        ids, product = experts.reshape(-1), weights * norms
        by_number = experts.argsort(dim=1, stable=True)
        order = by_number.gather(1, weights.gather(1, by_number).argsort(dim=1, descending=True, stable=True))
        first, second = (
            torch.zeros_like(weights).scatter_(1, order[:, rank : rank + 1], 1.0) for rank in (0, 1)
        )
        ranked = (first, second, weights, first * weights, second * weights)
        each = (torch.ones_like(weights), weights**2, norms, norms**2, product, product**2)
        # `[tokens x top_k, columns]` of `names` but the first and the last.
        columns = torch.stack((*ranked, *each), dim=-1).flatten(0, 1)
        if routed is not None:
            taken = routed.reshape(-1)
            ids, columns = ids[taken], columns[taken]
        if ids.device.type == "cpu":
            sums = columns.new_zeros(layer.num_experts, columns.shape[1]).index_add_(0, ids, columns)
        else:  # there index_add_ adds in any order
            sums = functional.one_hot(ids, layer.num_experts).to(columns.dtype).T @ columns
        norms = columns[:, self.names.index("norm_sum") - 1]
        largest = norms.new_zeros(layer.num_experts).scatter_reduce_(0, ids, norms, "amax")
        self._add(index, len(experts), torch.cat([sums.T, largest[None]]))
