"""Measure: gate statistics of a mixture-of-experts translation model (2212.09811, 4.1-4.2), by any runner.

Every real token that a sparse layer routes is counted: no padding, no beams of finished sentences. Sums are added in
the order of the batches, whoever runs them: whether the model is held whole or a layer at a time, how many processes
share the batches, and how often a run was interrupted changes no bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor

from prunecli.errors import StatisticsError
from prunecli.evaluation.decoding import beam_cache
from prunecli.methods.experts.batches import Batch, Pair, batch_cost, batches_of
from prunecli.methods.experts.observer import GateObserver, LayerSums
from prunecli.model.checkpoint import Checkpoint
from prunecli.progress import Progress, silent
from prunecli.results.gates import ANY, SUMS, GateStatistics, GateSums
from prunecli.running.lengths import length_limit
from prunecli.running.runner import Run, Runner, ignored
from prunecli.text.batching import pad
from prunecli.text.parallel import ParallelText, pair_name
from prunecli.text.tokens import language_id


@dataclass(frozen=True)
class CollectOptions:
    """How statistics are collected.

    Attributes:
        mode: "forced" runs the decoder on the reference, "beam" searches. The paper's authors did the first for
            their 202 languages, the second for 30 and for 53.
        beam: hypotheses per sentence, at least 2, in beam mode.
        batch_tokens: padded tokens in a batch (the beams come on top).
    """

    mode: Literal["forced", "beam"] = "forced"
    beam: int = 4
    batch_tokens: int = 4096


DEFAULT = CollectOptions()


@dataclass(frozen=True)
class State:
    """What a run has counted so far: a value that can be saved and continued.

    Attributes:
        batches: finished ones, in the order of `batches_of`.
        sums: (source, "X") -> the encoder's sums, (source, target) -> the decoder's.
    """

    batches: int = 0
    sums: Mapping[Pair, GateSums] = field(default_factory=dict)


def score(
    runner: Runner,
    checkpoint: Checkpoint,
    tokenizer: Any,
    text: ParallelText,
    pairs: Sequence[Pair],
    options: CollectOptions = DEFAULT,
    *,
    state: State = State(),
    save: Callable[[State], None] = ignored,
    progress: Progress = silent,
) -> GateStatistics:
    """Run a model over the text of `pairs` and sum what its routers do.

    The encoder runs once per source sentence, whatever the number of targets; its sums stand in every entry of that
    source. Experts are numbered as in the original model; those that were pruned before hold zeros.

    Args:
        runner: of `checkpoint`; each of several processes has its own, calls this with the same state, and has the
            same result.
        state: of an interrupted run with the same arguments, by any runner, to go on from.
        save: called with the state after every group of batches.

    Raises:
        UnsupportedModelError: the model has no experts.
        DataError: a language that the tokenizer lacks.
        UsageError, CheckpointError, OutputError: as `runner` does.
        PruneError: another process has ended.
    """
    layers = checkpoint.require_mixtures()
    for language in dict.fromkeys(name for pair in pairs for name in pair):
        language_id(tokenizer, language)
    observer = GateObserver(layers)
    empty = GateSums.zeros(len(layers), layers[0].original_experts)
    share = runner.process_group.share
    # Layer by layer, a line for each group: how many batches go together is only known on the way.
    whole, each = (silent, progress) if runner.layerwise else (progress, silent)
    batches = batches_of(runner.model, tokenizer, text, pairs, options.batch_tokens)
    with (
        whole("collecting gates", len(text) * len(pairs), "sentences") as advance,
        observer.watching(runner.model),
    ):
        advance(sum(batch.sentences for batch in islice(batches, state.batches)))
        for group in runner.groups(batches, batch_cost, state.batches):
            mine = share(group.batches)
            steps = runner.steps({"encoder": len(mine), "decoder": sum(len(batch.targets) for batch in mine)})
            with (
                each("collecting gates, layer by layer", steps, "batches x layers") as step,
                runner.running(group, step) as run,
            ):
                passes = _Passes(runner, run, tokenizer, options, observer, empty, advance)
                sums = passes.summed(mine, state.sums)
            # One assignment: an interrupt finds the state before these batches or after them, never between.
            state = State(state.batches + len(group.batches), sums)
            save(state)
            advance(sum(batch.sentences for batch in group.batches) - sum(batch.sentences for batch in mine))
    return statistics_of(checkpoint, options, state, pairs)


def statistics_of(
    checkpoint: Checkpoint, options: CollectOptions, state: State, pairs: Sequence[Pair]
) -> GateStatistics:
    """What a run that is complete has counted.

    Raises:
        StatisticsError: the state that it went on from was not whole.
    """
    for pair in pairs:
        if pair not in state.sums or (pair[0], ANY) not in state.sums:
            raise StatisticsError(
                f"the state of the interrupted run lacks {pair_name(*pair)}",
                "Remove the hidden file .OUTPUT.partial beside the output, and start again.",
            )
    family = checkpoint.require_architecture()
    layers = checkpoint.require_mixtures()
    return GateStatistics(
        fingerprint=checkpoint.fingerprint,
        model_type=family.model_type,
        mode=options.mode,
        layers=tuple(layer.name for layer in layers),
        num_experts=layers[0].original_experts,
        top_k=layers[0].top_k,
        entries={pair_name(*pair): state.sums[pair[0], ANY] + state.sums[pair] for pair in pairs},
    )


@dataclass(frozen=True)
class _Passes:
    """The passes of a group of batches: of each batch the encoder once, then the decoder for every target."""

    runner: Runner
    run: Run
    tokenizer: Any
    options: CollectOptions
    observer: GateObserver
    empty: GateSums
    advance: Callable[[float], None]

    def summed(self, batches: Sequence[Batch], before: Mapping[Pair, GateSums]) -> dict[Pair, GateSums]:
        """The sums of all processes' batches, added to those `before`."""
        sums, encoded = dict(before), list[Any]()
        if self.run.restored is not None:
            encoded = self.run.restored["encoded"]
            sums = {
                (source, target): GateSums(*(part.numpy() for part in parts))
                for source, target, parts in self.run.restored["sums"]
            }

        def keeping() -> dict[str, Any]:
            arrays = [
                [*pair, [torch.from_numpy(getattr(entry, name)) for name in SUMS]]
                for pair, entry in sums.items()
            ]
            return {"encoded": encoded, "sums": arrays}

        self.run.forward(
            [partial(self._encode, batch) for batch in batches],
            side="encoder",
            observer=self.observer,
            reduce=partial(self._add, sums, [[(batch.source, ANY)] for batch in batches]),
            finish=lambda _number, output: encoded.append(self.run.keep(output)),
            keeping=keeping,
        )
        targets = [(number, target) for number, batch in enumerate(batches) for target in batch.targets]
        decode = self._force if self.options.mode == "forced" else self._search
        self.run.forward(
            [partial(decode, batches[number], target, encoded[number]) for number, target in targets],
            side="decoder",
            observer=self.observer,
            reduce=partial(
                self._add, sums, [[(batch.source, target) for target in batch.targets] for batch in batches]
            ),
            finish=lambda number, _output: self.advance(len(batches[targets[number][0]].sources)),
            keeping=keeping,
        )
        return sums

    def _add(
        self, sums: dict[Pair, GateSums], entries: Sequence[Sequence[Pair]], seen: list[LayerSums]
    ) -> None:
        """Add what was seen of the passes of all processes, batch by batch.

        Args:
            entries: of each batch, one for each of its passes.
            seen: of all passes.
        """
        passes = iter(seen)
        mine = [dict(zip(batch, passes, strict=False)) for batch in entries]
        for batch in self.runner.process_group.gather_shares(mine):
            for entry, layers in batch.items():
                if layers or entry not in sums:
                    sums[entry] = sums.get(entry, self.empty).plus(layers)

    def _padded(self, rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Ids and mask `[batch, tokens]`."""
        ids, mask = pad(rows, int(self.tokenizer.pad_token_id))
        return ids.to(self.runner.device), mask.to(self.runner.device)

    def _encode(self, batch: Batch) -> Tensor:
        """The encoder's output `[batch, source tokens, d_model]`."""
        ids, mask = self._padded(batch.sources)
        output: Tensor = self.runner.model.get_encoder()(input_ids=ids, attention_mask=mask).last_hidden_state
        return output

    def _force(self, batch: Batch, target: str, encoded: Any) -> None:
        """Run the decoder on the reference: start token, then all labels but the last (teacher forcing)."""
        model = self.runner.model
        start = int(model.config.decoder_start_token_id)
        ids, mask = self._padded([[start, *row[:-1]] for row in batch.targets[target]])
        # The output layer's product is left out: routing does not need it.
        model.get_decoder()(
            input_ids=ids,
            attention_mask=mask,
            encoder_hidden_states=self.run.fetch(encoded),
            encoder_attention_mask=self._padded(batch.sources)[1],
            use_cache=False,
        )

    def _search(self, batch: Batch, target: str, encoded: Any) -> None:
        """Translate with beam search; a sentence's beams count until it is finished."""
        from transformers.modeling_outputs import MoEModelOutput

        model, mask = self.runner.model, self._padded(batch.sources)[1]
        positions = int(model.config.max_position_embeddings)
        longest = torch.tensor([length_limit(n, positions) for n in mask.sum(dim=1).tolist()])
        with self.observer.searching(model, self.options.beam, longest.to(mask.device)):
            model.generate(
                # generate expands the value that it is given: of its own for each target
                encoder_outputs=MoEModelOutput(last_hidden_state=self.run.fetch(encoded)),
                attention_mask=mask,
                forced_bos_token_id=language_id(self.tokenizer, target),
                num_beams=self.options.beam,
                do_sample=False,
                max_new_tokens=int(longest.max()),
                max_length=None,
                past_key_values=beam_cache(model),
            )
