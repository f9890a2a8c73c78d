"""Measure: gate statistics of a mixture-of-experts translation model (2212.09811, 4.1-4.2).

Every real token that a sparse layer routes is counted: no padding, no beams of finished sentences. Sums go batch by
batch into `State`, a value that can be saved and continued with the same result to the last bit. Several processes
share the batches, whose sums are added in the same order all the same: how many they are changes no bit either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from prunecli.errors import StatisticsError
from prunecli.evaluation.decoding import beam_cache
from prunecli.methods.experts.batches import Batch, Pair, batches_of, chunks
from prunecli.methods.experts.beams import live_beams
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.mixtures import SparseLayer
from prunecli.modules.loading import sparse_ffns
from prunecli.modules.sparse_ffn import Routing, SparseFFN
from prunecli.processes import ALONE, ProcessGroup
from prunecli.progress import Progress, silent
from prunecli.results.gates import ANY, SUMS, GateStatistics, GateSums
from prunecli.running.lengths import length_limit
from prunecli.text.batching import pad
from prunecli.text.parallel import ParallelText, pair_name
from prunecli.text.tokens import language_id

BATCHES_APART = 4
"""Batches of each of several processes from one adding up to the next, at which they wait for the slowest."""


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


@dataclass(frozen=True)
class State:
    """What a run has counted so far.

    Attributes:
        batches: finished ones, in the order of `batches_of`.
        sums: (source, "X") -> the encoder's sums, (source, target) -> the decoder's.
    """

    batches: int = 0
    sums: Mapping[Pair, GateSums] = field(default_factory=dict)


def collect_gates(
    checkpoint: Checkpoint,
    model: Any,
    tokenizer: Any,
    text: ParallelText,
    pairs: Sequence[Pair],
    options: CollectOptions = CollectOptions(),
    *,
    state: State = State(),
    save: Callable[[State], None] = lambda _state: None,
    progress: Progress = silent,
    process_group: ProcessGroup = ALONE,
) -> GateStatistics:
    """Run `model` over the text of `pairs` and sum what its routers do.

    The encoder runs once per source sentence, whatever the number of targets; its sums stand in every entry of that
    source. Experts are numbered as in the original model; those that were pruned before hold zeros.

    Args:
        model: what `load_model` made of `checkpoint`.
        state: of an interrupted run with the same arguments, to go on from.
        save: called with the state after every batch; of several processes, after a few of each.
        process_group: all of them call this, with the same state, and have the same result.

    Raises:
        UnsupportedModelError: the model has no experts.
        DataError: a language that the tokenizer lacks.
        PruneError: another process has ended.
    """
    layers = checkpoint.require_mixtures()
    check_languages(tokenizer, pairs)
    total = len(text) * len(pairs)
    unit = "sentences"
    with (
        torch.inference_mode(),
        recording(model, layers) as recorder,
        progress("collecting gates", total, unit) as advance,
    ):
        batches = batches_of(model, tokenizer, text, pairs, options.batch_tokens)
        for batch in islice(batches, state.batches):
            advance(batch.sentences)
        for chunk in chunks(
            batches, 1 if process_group.world_size == 1 else BATCHES_APART * process_group.world_size
        ):
            found = []
            for batch in process_group.share(chunk):
                found.append(_run(model, tokenizer, batch, recorder, options))
                advance(batch.sentences)
            # One assignment: an interrupt finds the state before these batches or after them, never between.
            state = _added(state, process_group.gather_shares(found))
            save(state)
            advance(
                sum(one.sentences for one in chunk) - sum(one.sentences for one in process_group.share(chunk))
            )
    return statistics_of(checkpoint, options, state, pairs)


def _added(state: State, found: Sequence[Mapping[Pair, GateSums]]) -> State:
    """The state after more batches."""
    sums = dict(state.sums)
    for batch in found:
        for key, value in batch.items():
            sums[key] = sums[key] + value if key in sums else value
    return State(state.batches + len(found), sums)


def check_languages(tokenizer: Any, pairs: Sequence[Pair]) -> None:
    """Have every language of the pairs known.

    Raises:
        DataError: the tokenizer lacks one.
    """
    for language in dict.fromkeys(name for pair in pairs for name in pair):
        language_id(tokenizer, language)


def statistics_of(
    checkpoint: Checkpoint, options: CollectOptions, state: State, pairs: Sequence[Pair]
) -> GateStatistics:
    """What a run that is complete has found.

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
        top_k=int(family.top_k or 1),
        entries={pair_name(*pair): state.sums[pair[0], ANY] + state.sums[pair] for pair in pairs},
    )


def _run(
    model: Any, tokenizer: Any, batch: Batch, recorder: Recorder, options: CollectOptions
) -> dict[Pair, GateSums]:
    """The sums of one batch: the encoder's once, the decoder's for every target."""
    pad_id = int(tokenizer.pad_token_id)
    ids, mask = (tensor.to(model.device) for tensor in pad(batch.sources, pad_id))
    encoded = model.get_encoder()(input_ids=ids, attention_mask=mask)
    found = {(batch.source, ANY): recorder.take()}
    for target, labels in batch.targets.items():
        if options.mode == "forced":
            force(model, labels, pad_id, encoded.last_hidden_state, mask)
        else:
            _search(model, tokenizer, target, encoded, mask, options.beam, recorder)
        found[batch.source, target] = recorder.take()
    return found


def force(model: Any, labels: Sequence[Sequence[int]], pad_id: int, encoded: Tensor, mask: Tensor) -> None:
    """Run the decoder on the reference: start token, then all labels but the last (teacher forcing).

    Args:
        labels: of each sentence, language token first.
        encoded: the encoder's output `[batch, source tokens, d_model]`.
        mask: `[batch, source tokens]`, 0 for padding.
    """
    start = int(model.config.decoder_start_token_id)
    rows = [[start, *row[:-1]] for row in labels]
    ids, real = (tensor.to(encoded.device) for tensor in pad(rows, pad_id))
    # The output layer's product is left out: routing does not need it.
    model.get_decoder()(
        input_ids=ids,
        attention_mask=real,
        encoder_hidden_states=encoded,
        encoder_attention_mask=mask,
        use_cache=False,
    )


def _search(
    model: Any, tokenizer: Any, target: str, encoded: Any, mask: Tensor, beam: int, recorder: Recorder
) -> None:
    """Translate with beam search; a sentence's beams count until it is finished."""
    positions = int(model.config.max_position_embeddings)
    longest = torch.tensor([length_limit(n, positions) for n in mask.sum(dim=1).tolist()], device=mask.device)
    with live_beams(model, beam, longest) as live:
        recorder.live = live
        try:
            model.generate(
                # generate expands the value that it is given: a copy keeps ours for the next target
                encoder_outputs=type(encoded)(last_hidden_state=encoded.last_hidden_state),
                attention_mask=mask,
                forced_bos_token_id=language_id(tokenizer, target),
                num_beams=beam,
                do_sample=False,
                max_new_tokens=int(longest.max()),
                max_length=None,
                past_key_values=beam_cache(model),
            )
        finally:
            recorder.live = None


class Recorder:
    """Sums what the sparse layers route, until `take`; on the model's device, in integers and float64."""

    def __init__(self, layers: Sequence[SparseLayer]) -> None:
        self._layers = layers
        self._sums: dict[int, list[Tensor]] = {}
        self.live: Callable[[], Tensor] | None = None
        """Which rows count, where not all do: `[batch * beams]` bool."""

    def observe(self, index: int, routing: Routing) -> None:
        gates, experts = routing.gates, routing.experts
        if self.live is not None:
            rows = self.live().to(gates.device)
            gates, experts = gates[rows], experts[rows]
        sums = [torch.tensor(len(gates)), gates.sum(dim=0, dtype=torch.float64)]
        numbers = torch.arange(gates.shape[1], device=gates.device)
        for rank in range(2):
            # A masked sum, not a scatter: its order, and so its rounding, is fixed on every device.
            chosen = experts[:, rank : rank + 1] == numbers
            sums += [chosen.sum(dim=0), gates.where(chosen, 0.0).sum(dim=0, dtype=torch.float64)]
        held = self._sums.get(index)
        self._sums[index] = sums if held is None else [a + b for a, b in zip(held, sums, strict=True)]

    def take(self) -> GateSums:
        """The sums since the last call, in original expert ids."""
        taken = self.nothing()
        for index, (tokens, gate_sum, top1, conf1, top2, conf2) in self._sums.items():
            ids = np.asarray(self._layers[index].experts)
            taken.tokens[index] = int(tokens)
            named = {"top1": top1, "top2": top2, "gate_sum": gate_sum, "conf1_sum": conf1, "conf2_sum": conf2}
            for name in SUMS[1:]:
                getattr(taken, name)[index, ids] = named[name].cpu().numpy()
        self._sums = {}
        return taken

    def nothing(self) -> GateSums:
        """What `take` gives where nothing was routed."""
        return GateSums.zeros(len(self._layers), self._layers[0].original_experts)

    def position(self, layer: SparseLayer) -> int:
        """Where in the sums a layer stands."""
        return [one.name for one in self._layers].index(layer.name)


@contextmanager
def recording(model: Any, layers: Sequence[SparseLayer]) -> Iterator[Recorder]:
    """Observe every sparse FFN of `model` while the block runs."""
    modules: Mapping[str, SparseFFN] = sparse_ffns(model)
    recorder = Recorder(layers)
    for index, layer in enumerate(layers):
        modules[layer.name].observer = _observer(recorder, index)
    try:
        yield recorder
    finally:
        for layer in layers:
            modules[layer.name].observer = None


def _observer(recorder: Recorder, index: int) -> Callable[[Routing], None]:
    return lambda routing: recorder.observe(index, routing)
