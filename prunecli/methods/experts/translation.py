"""Text in pairs of languages, and how a translation model is run over it for gate statistics."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from prunecli.errors import UsageError
from prunecli.evaluation.decoding import beam_cache, sound_settings
from prunecli.methods.experts.observer import GateObserver
from prunecli.methods.experts.score import DEFAULT, CollectOptions, Passes, Sums
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.sparse_layer import SparseLayer
from prunecli.results.gates import ANY, Mode
from prunecli.running.encoding import padding_id, require_task
from prunecli.running.layerwise.budget import activation_bytes, state_bytes
from prunecli.running.layerwise.runner import Layerwise
from prunecli.running.lengths import length_limit
from prunecli.running.runner import Advance, BatchCost, Run, Runner
from prunecli.text.batching import length_bucketed, pad
from prunecli.text.parallel import ParallelText, pair_name
from prunecli.text.tokens import encode, language_id

Pair = tuple[str, str]
Ids = Sequence[int]
"""Token ids of a sentence; arrays, since a text in many languages is held as a whole."""


@dataclass(frozen=True)
class Translation:
    """Sentences of some languages, run for the entries of `pairs`. A `Material`.

    The encoder runs once per source sentence, whatever the number of targets; its sums stand in every entry of that
    source.
    """

    text: ParallelText
    pairs: Sequence[Pair]
    options: CollectOptions = DEFAULT

    @property
    def mode(self) -> Mode:
        """See `Material`."""
        return self.options.mode

    @property
    def key(self) -> dict[str, Any]:
        """See `Material`."""
        digest = hashlib.sha256()
        for language, lines in self.text.sentences.items():
            digest.update("\n".join((language, *lines, "")).encode())
        return {
            "text": digest.hexdigest(),
            "pairs": [list(pair) for pair in self.pairs],
            **asdict(self.options),
        }

    def whole(self, _checkpoint: Checkpoint) -> UsageError | None:
        """See `Material`."""
        if self.mode == "forced":
            return None
        return UsageError(
            "--mode beam needs the whole model in memory: each step of a search goes through all layers",
            "Use --mode forced, or leave --memory out on a machine that holds the model.",
        )

    def layers(self, checkpoint: Checkpoint) -> tuple[SparseLayer, ...]:
        """See `Material`."""
        return checkpoint.require_mixtures()

    def passes(self, runner: Runner, layers: Sequence[SparseLayer], tokenizer: Any) -> Passes:
        """See `Material`.

        Raises:
            DataError: a language that the tokenizer lacks.
            CheckpointError: a value of config.json that cannot be.
        """
        require_task(runner.model, "translation")
        for language in dict.fromkeys(name for pair in self.pairs for name in pair):
            language_id(tokenizer, language)
        passes = _Passes(runner, tokenizer, GateObserver(layers), self.options)
        return Passes(
            passes.observer,
            {pair_name(source, target): ((source, ANY), (source, target)) for source, target in self.pairs},
            len(self.text) * len(self.pairs),
            "sentences",
            batches_of(runner.model, tokenizer, self.text, self.pairs, self.options.batch_tokens),
            lambda batches: {
                "encoder": len(batches),
                "decoder": sum(len(batch.targets) for batch in batches),
            },
            passes.run,
        )


@dataclass(frozen=True)
class Batch:
    """Sentences of one source, to be decoded into every target; `targets[language][sentence]` are label ids."""

    source: str
    sources: Sequence[Ids]
    targets: Mapping[str, Sequence[Ids]]

    @property
    def size(self) -> int:
        """Sentences to be decoded: those of all targets."""
        return len(self.sources) * len(self.targets)

    def cost(self, runner: Layerwise) -> BatchCost:
        """What it takes layer by layer: states while the encoder runs; beside its output, while the decoder does."""
        shape, sentences = runner.shape, len(self.sources)

        def states(rows: Sequence[Ids]) -> int:
            return state_bytes(shape, sentences * max(map(len, rows)), sum(map(len, rows)))

        keys = max(map(len, self.sources))
        lengths = (keys, *(max(map(len, labels)) for labels in self.targets.values()))
        output = sentences * keys * shape.d_model * shape.itemsize
        return BatchCost(
            max(activation_bytes(shape, sentences, length, keys) for length in lengths),
            (states(self.sources) + output, output + sum(map(states, self.targets.values()))),
        )


@dataclass(frozen=True)
class _Passes:
    """Of each batch the encoder once, then the decoder for every target."""

    runner: Runner
    tokenizer: Any
    observer: GateObserver
    options: CollectOptions

    def run(self, run: Run, batches: Sequence[Batch], sums: Sums, advance: Advance) -> None:
        """See `Passes`."""
        encoded = list[Any]()
        if run.restored is not None:
            encoded = run.restored["encoded"]
            sums.restore(run.restored["sums"])

        def keeping() -> dict[str, Any]:
            return {"encoded": encoded, "sums": sums.kept()}

        run.forward(
            [partial(self._encode, batch) for batch in batches],
            side="encoder",
            observer=self.observer,
            reduce=partial(sums.add, [[(batch.source, ANY)] for batch in batches]),
            finish=lambda _number, output: encoded.append(run.keep(output)),
            keeping=keeping,
        )
        targets = [(number, target) for number, batch in enumerate(batches) for target in batch.targets]
        decode = self._force if self.options.mode == "forced" else self._search
        run.forward(
            [partial(decode, run, batches[number], target, encoded[number]) for number, target in targets],
            side="decoder",
            observer=self.observer,
            reduce=partial(
                sums.add, [[(batch.source, target) for target in batch.targets] for batch in batches]
            ),
            finish=lambda number, _output: advance(len(batches[targets[number][0]].sources)),
            keeping=keeping,
        )

    def _padded(self, rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Ids and mask `[batch, tokens]`."""
        ids, mask = pad(rows, padding_id(self.runner.model, self.tokenizer))
        return ids.to(self.runner.device), mask.to(self.runner.device)

    def _encode(self, batch: Batch) -> Any:
        """The encoder's output `[batch, source tokens, d_model]`."""
        ids, mask = self._padded(batch.sources)
        return self.runner.model.get_encoder()(input_ids=ids, attention_mask=mask).last_hidden_state

    def _force(self, run: Run, batch: Batch, target: str, encoded: Any) -> None:
        """Run the decoder on the reference: start token, then all labels but the last (teacher forcing)."""
        model = self.runner.model
        start = int(model.config.decoder_start_token_id)
        ids, mask = self._padded([[start, *row[:-1]] for row in batch.targets[target]])
        # The output layer's product is left out: routing does not need it.
        model.get_decoder()(
            input_ids=ids,
            attention_mask=mask,
            encoder_hidden_states=run.fetch(encoded),
            encoder_attention_mask=self._padded(batch.sources)[1],
            use_cache=False,
        )

    def _search(self, run: Run, batch: Batch, target: str, encoded: Any) -> None:
        """Translate with beam search; a sentence's beams count until it is finished."""
        from transformers.modeling_outputs import MoEModelOutput

        model, beam, mask = self.runner.model, self.options.beam, self._padded(batch.sources)[1]
        positions = int(model.config.max_position_embeddings)
        longest = torch.tensor([length_limit(n, positions) for n in mask.sum(dim=1).tolist()])
        with self.observer.searching(model, beam, longest.to(mask.device)), sound_settings(model):
            model.generate(
                # generate expands the value that it is given: of its own for each target
                encoder_outputs=MoEModelOutput(last_hidden_state=run.fetch(encoded)),
                attention_mask=mask,
                forced_bos_token_id=language_id(self.tokenizer, target, model.config.vocab_size),
                num_beams=beam,
                do_sample=False,
                max_new_tokens=int(longest.max()),
                max_length=None,
                past_key_values=beam_cache(model),
            )


def batches_of(
    model: Any, tokenizer: Any, text: ParallelText, pairs: Sequence[Pair], batch_tokens: int
) -> Iterator[Batch]:
    """Every batch, in an order that is a function of the arguments."""
    config = model.config
    bounds = {"max_length": config.max_position_embeddings - 1, "vocabulary": config.vocab_size}
    rows: dict[str, list[Ids]] = {}  # as targets, in which languages are met again for each source

    def ids_of(language: str, as_target: bool) -> list[Ids]:
        found = encode(tokenizer, text.sentences[language], language, as_target=as_target, **bounds)
        return [array("i", ids) for ids in found]

    for source in dict.fromkeys(pair[0] for pair in pairs):
        sources = ids_of(source, False)
        targets = [target for name, target in pairs if name == source]
        rows |= {target: ids_of(target, True) for target in targets if target not in rows}
        lengths = [
            (len(ids), max(len(rows[target][row]) for target in targets)) for row, ids in enumerate(sources)
        ]
        for batch in length_bucketed(lengths, batch_tokens):
            yield Batch(
                source,
                [sources[row] for row in batch],
                {target: [rows[target][row] for row in batch] for target in targets},
            )
