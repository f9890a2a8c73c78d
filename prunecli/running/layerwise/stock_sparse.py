"""Layers of stock experts, layer by layer: passes are broken off at the experts, which are gone through in their order.

What is sent to them is kept once a token, whatever the number of its experts; each expert adds its weighted outputs to
one sum a token, in the order in which `combine` adds them. Then the passes are begun once more, the sums at hand.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from prunecli.architectures.records import Side
from prunecli.modules.cpu_linear import dot_products
from prunecli.modules.grouped import dispatch
from prunecli.modules.stock_experts import (
    ExpertUse,
    ExpertWeights,
    norms_of,
    run_expert,
    shares_out,
    sums_of,
    weighted,
)
from prunecli.modules.stock_model import StockExperts
from prunecli.modules.trees import map_tree
from prunecli.running.layerwise.entering import LayerReplay, StopForward
from prunecli.running.layerwise.experts import Assigned, run_experts
from prunecli.running.layerwise.parts import Stage
from prunecli.running.layerwise.reading import Loaded, Reader
from prunecli.running.layerwise.states import StateStore, Stored
from prunecli.running.layerwise.swaps import recalling, remembering, swapped
from prunecli.running.runner import Pass

SENT_BYTES = 12
"""Of what is sent, for each of a token's values: itself, the sum, and a share of its experts' numbers and weights."""


@dataclass(kw_only=True)
class Sent(Assigned):
    """What one pass sends to the experts of a layer, and what they made of it.

    Attributes:
        hidden: `[tokens, width]`, in the type of the experts.
        mixed: `[tokens, width]` float32, the sum of the outputs so far.
        tokens: `[assignments]` int64, the token of each, sorted by expert.
        weights: `[assignments]`, of the router.
        norms: `[assignments]` float32, of the outputs so far.
        counted: `[assignments]` bool, of which outputs are added up; None: of none.
        sums: `[experts, width]` float64, those sums; None likewise.
    """

    hidden: Stored
    mixed: Stored
    tokens: Stored
    weights: Stored
    norms: Stored
    counted: Stored | None = None
    sums: Stored | None = None


class StockPasses:
    """How passes go through a layer of stock experts.

    Args:
        reader: of the experts.
        states: where tokens and sums are kept.
        replay: of the layers.
        device: to compute on.
    """

    def __init__(self, reader: Reader, states: StateStore, replay: LayerReplay, device: torch.device) -> None:
        self._reader, self._states, self._replay, self._device = reader, states, replay, device

    def route(
        self, stage: Stage, experts: StockExperts, passes: Sequence[Pass], kept: Sequence[Mapping[Side, Any]]
    ) -> tuple[list[Sent], list[int]]:
        """All passes up to the experts.

        Returns:
            what each pass sends there; the experts that any does, which the reader is asked for in this order, theirs.
        """
        sent: list[Sent] = []
        known: set[int] = set()
        asked = 0
        for number, forward in enumerate(passes):
            sent.append(self._route(stage, experts, forward, kept[number], len(passes) - number))
            known |= {expert for expert in range(experts.layer.num_experts) if sent[-1].goes_to(expert)}
            # Those before which none can come any more are read meanwhile.
            while asked in known:
                self._reader.want(stage.expert(asked))
                asked += 1
        for expert in sorted(expert for expert in known if expert >= asked):
            self._reader.want(stage.expert(expert))
        return sent, sorted(known)

    def run(self, experts: StockExperts, wanted: Sequence[int], sent: Sequence[Sent]) -> None:
        """The experts, one after another, each on its tokens of every pass."""
        module, states = experts.module, self._states

        def run(one: Sent, expert: int, loaded: Loaded) -> None:
            start, end = one.span(expert)
            tokens = states.rows(one.tokens, start, end)
            rows = states.gather(one.hidden, tokens).to(self._device)
            with dot_products(rows.dtype, [end - start]):
                outputs = run_expert(module, rows, ExpertWeights(*loaded.tensors)).to(rows.dtype)
            states.write(one.norms, start, norms_of(outputs))
            if one.sums is not None and one.counted is not None:
                counts = torch.tensor([end - start])
                states.write(one.sums, expert, sums_of(outputs, counts, states.rows(one.counted, start, end)))
            given = states.rows(one.weights, start, end).to(self._device)
            states.add(one.mixed, tokens, weighted(outputs, given).float().cpu())

        run_experts(run, self._reader, wanted, sent)

    @contextmanager
    def answering(self, stage: Stage, experts: StockExperts, sent: Sent) -> Iterator[None]:
        """Inside, a pass finds the experts' sum at hand, and what was kept of attentions; it is observed."""

        def answer(hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
            observer = getattr(experts.module, "observer", None)
            if observer is not None:
                norms = self._states.get(sent.norms).to(self._device)
                plan = dispatch(chosen, experts.layer.num_experts)
                sums = None if sent.sums is None else self._states.get(sent.sums)
                observer(ExpertUse(chosen, weights, norms[plan.position], output_sums=sums))
            return self._states.get(sent.mixed).to(self._device, hidden.dtype)

        with (
            swapped(experts.module, "runner", answer),
            recalling(stage, self._states, sent.attention, self._device),
        ):
            yield

    def drop(self, sent: Sent) -> None:
        """Give the room of all that is kept back."""
        for held in (sent.hidden, sent.mixed, sent.tokens, sent.weights, sent.norms, sent.counted, sent.sums):
            if held is not None:
                self._states.drop(held)
        map_tree(tuple(sent.attention.values()), self._states.drop, Stored)

    def _route(
        self,
        stage: Stage,
        experts: StockExperts,
        forward: Pass,
        kept: Mapping[Side, Any],
        to_come: int,
    ) -> Sent:
        """One pass up to the experts; `to_come` passes, this one among them, still need room."""
        attention: dict[int, Any] = {}
        held, states = ExpertWeights.of(experts.module), self._states

        counted, mask = getattr(experts.module, "counted", None), None

        def leave(*sent: Tensor) -> Tensor:
            nonlocal mask
            mask = None if counted is None else counted()
            raise StopForward(sent)

        with ExitStack() as stack:
            stack.enter_context(swapped(experts.module, "runner", leave))
            stack.enter_context(remembering(stage, states, attention, SENT_BYTES, to_come))
            hidden, chosen, weights = self._replay.begin(forward, kept)
        plan = dispatch(chosen, experts.layer.num_experts)
        by_expert = torch.empty_like(weights).view(-1)
        by_expert[plan.position.view(-1)] = weights.reshape(-1)
        keeps = (
            torch.ones(len(plan.source), dtype=torch.bool) if mask is None else mask.cpu()[plan.source.cpu()]
        )
        shape = experts.layer.num_experts, hidden.shape[1]
        return Sent(
            counted=None if counted is None else states.put(keeps),
            sums=None if counted is None else states.put(torch.zeros(shape, dtype=torch.float64)),
            hidden=states.put(hidden.to(held.up.dtype)),
            mixed=states.put(torch.zeros(hidden.shape, dtype=torch.float32)),
            tokens=states.put(plan.source),
            weights=states.put(by_expert),
            norms=states.empty((len(plan.source),), torch.float32),
            starts=[0, *accumulate(plan.groups.sizes)],
            shared_out=self._device.type == "cpu" and shares_out(held, plan.groups.sizes),
            attention=attention,
        )
