"""Sparse layers, layer by layer: passes are broken off at the experts, which are gone through one at a time for all.

Then the passes are begun once more, the experts' outputs at hand. Experts that no token was routed to are not read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from prunecli.architectures.records import Side
from prunecli.modules.grouped import Groups
from prunecli.modules.sparse_ffn import SparseFFN
from prunecli.modules.trees import map_tree
from prunecli.running.layerwise.entering import LayerReplay, StopForward
from prunecli.running.layerwise.experts import Assigned, run_experts
from prunecli.running.layerwise.parts import Stage
from prunecli.running.layerwise.reading import Loaded, Reader
from prunecli.running.layerwise.states import StateStore, Stored
from prunecli.running.layerwise.swaps import recalling, remembering, swapped
from prunecli.running.runner import Pass


@dataclass(kw_only=True)
class Routed(Assigned):
    """What one pass sends to the experts of a sparse layer.

    Attributes:
        rows: `[assignments, d_model]` float32, sorted by expert; each expert's outputs take the place of its rows.
    """

    rows: Stored


class SparsePasses:
    """How passes go through a sparse layer.

    Args:
        reader: of the experts.
        states: where rows and outputs are kept.
        replay: of the layers.
        device: to compute on.
        keep_attention: whether what a layer's attentions return is kept where there is room, or computed twice.
    """

    def __init__(
        self,
        reader: Reader,
        states: StateStore,
        replay: LayerReplay,
        device: torch.device,
        *,
        keep_attention: bool = True,
    ) -> None:
        self._reader, self._states, self._replay = reader, states, replay
        self._device, self._keep_attention = device, keep_attention

    def route(
        self,
        stage: Stage,
        ffn: SparseFFN,
        passes: Sequence[Pass],
        kept: Sequence[Mapping[Side, Any]],
        after: Callable[[Stage, int], None],
    ) -> tuple[list[Routed], list[int]]:
        """All passes up to the experts.

        Returns:
            what each pass sends there; the experts that any does, which the reader is asked for in this order.
        """
        routed: list[Routed] = []
        wanted: dict[int, None] = {}
        for number, forward in enumerate(passes):
            routed.append(self._route(stage, ffn, forward, kept[number], len(passes) - number))
            after(stage, number)
            for expert in range(ffn.num_experts):
                if routed[-1].goes_to(expert) and expert not in wanted:
                    wanted[expert] = None
                    self._reader.want(stage.expert(expert))
        return routed, list(wanted)

    def run(self, ffn: SparseFFN, wanted: Sequence[int], routed: Sequence[Routed]) -> None:
        """The experts, one after another, each on its rows of every pass."""

        def run(one: Routed, expert: int, loaded: Loaded) -> None:
            first, first_bias, second, second_bias = loaded.tensors
            start, end = one.span(expert)
            rows = self._states.rows(one.rows, start, end).to(self._device, first.dtype)
            outputs = ffn.run_expert(rows, (first, first_bias, second, second_bias))
            self._states.write(one.rows, start, outputs)

        run_experts(run, self._reader, wanted, routed)

    @contextmanager
    def answering(self, stage: Stage, ffn: SparseFFN, routed: Routed) -> Iterator[None]:
        """Inside, a pass finds the experts' outputs at hand, and what was kept of attentions."""

        def answer(rows: Tensor, _groups: Groups) -> Tensor:
            return self._states.rows(routed.rows, 0, len(rows)).to(self._device)

        with (
            swapped(ffn, "runner", answer),
            swapped(ffn, "observer", None),
            recalling(stage, self._states, routed.attention, self._device),
        ):
            yield

    def drop(self, routed: Routed) -> None:
        """Give the room of rows and attentions back."""
        self._states.drop(routed.rows)
        for tree in routed.attention.values():
            map_tree(tree, self._states.drop, Stored)

    def _route(
        self, stage: Stage, ffn: SparseFFN, forward: Pass, kept: Mapping[Side, Any], to_come: int
    ) -> Routed:
        """One pass up to the experts; `to_come` passes, this one among them, still need room."""
        attention: dict[int, Any] = {}

        def leave(rows: Tensor, groups: Groups) -> Tensor:
            raise StopForward((rows, groups.sizes))

        with ExitStack() as stack:
            stack.enter_context(swapped(ffn, "runner", leave))
            if self._keep_attention:
                stack.enter_context(remembering(stage, self._states, attention, ffn.top_k * 4, to_come))
            rows, counts = self._replay.begin(forward, kept)
        return Routed(
            rows=self._states.put(rows.float()),
            starts=[0, *accumulate(counts)],
            shared_out=self._device.type == "cpu" and ffn.shares_out(counts),
            attention=attention,
        )
