"""What the routers of a mixture of experts do while it runs: sums over the real tokens, for one pass at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from prunecli.model.sparse_layer import SparseLayer
from prunecli.modules.loading import sparse_ffns
from prunecli.modules.sparse_ffn import Routing, SparseFFN
from prunecli.results.gate_sums import GateSums

LayerSums = dict[int, GateSums]
"""Number of a sparse layer -> its sums, of one row."""

SUMMED = ("gate_sum", "top1", "conf1_sum", "top2", "conf2_sum")
"""What is summed of each expert, in the order of the rows that are kept; all in float64, which counts exactly."""


class GateObserver:
    """Sums what sparse layers route, until `take`; on the model's device, in float64. An `Observer`.

    Args:
        layers: the mixtures of the checkpoint.
    """

    def __init__(self, layers: Sequence[SparseLayer]) -> None:
        self._layers = layers
        self._sums: dict[int, tuple[int, Tensor]] = {}
        self._live: Callable[[], Tensor] | None = None

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Observe every sparse FFN of `model` while the block runs."""
        modules: Mapping[str, SparseFFN] = sparse_ffns(model)
        for index, layer in enumerate(self._layers):
            modules[layer.name].observer = partial(self._observe, index)
        try:
            yield
        finally:
            for layer in self._layers:
                modules[layer.name].observer = None

    @contextmanager
    def searching(self, model: Any, beams: int, longest: Tensor) -> Iterator[None]:
        """While the block runs `model.generate`, only the beams of unfinished sentences count: see `live_beams`."""
        with live_beams(model, beams, longest) as self._live:
            try:
                yield
            finally:
                self._live = None

    def take(self) -> LayerSums:
        """The sums since the last call, `[1]` and `[1, experts]` in original expert ids, of layers that routed."""
        taken: LayerSums = {}
        by_device: dict[torch.device, list[int]] = {}
        for index, (_, sums) in self._sums.items():
            by_device.setdefault(sums.device, []).append(index)
        for indices in by_device.values():  # at once: each copy waits for a GPU
            held = torch.cat([self._sums[index][1] for index in indices], dim=1).cpu().numpy()
            ends = np.cumsum([self._sums[index][1].shape[1] for index in indices])
            for index, found in zip(indices, np.split(held, ends[:-1], axis=1), strict=True):
                ids = np.asarray(self._layers[index].experts)
                taken[index] = row = GateSums.zeros(1, self._layers[0].original_experts)
                row.tokens[0] = self._sums[index][0]
                for name, values in zip(SUMMED, found, strict=True):
                    getattr(row, name)[0, ids] = values
        self._sums = {}
        return taken

    def _observe(self, index: int, routing: Routing) -> None:
        gates, experts = routing.gates, routing.experts
        if self._live is not None:
            rows = self._live().to(gates.device).nonzero().squeeze(1)
            gates, experts = gates[rows], experts[rows]
        sums = [gates.sum(dim=0, dtype=torch.float64)]
        numbers = torch.arange(gates.shape[1], device=gates.device)
        for rank in range(2):
            # A masked sum, not a scatter: its order, and so its rounding, is fixed on every device.
            chosen = experts[:, rank : rank + 1] == numbers
            sums += [chosen.sum(dim=0).double(), gates.where(chosen, 0.0).sum(dim=0, dtype=torch.float64)]
        tokens, stacked = len(gates), torch.stack(sums)
        if (before := self._sums.get(index)) is not None:
            tokens, stacked = tokens + before[0], stacked + before[1]
        self._sums[index] = tokens, stacked


@contextmanager
def live_beams(model: Any, beams: int, longest: Tensor) -> Iterator[Callable[[], Tensor]]:
    """Follow `model.generate` while the block runs.

    A sentence in a batch goes on being computed until the whole batch is done. Its beams count only as long as it
    would run alone: transformers asks `_beam_search_has_unfinished_sequences` once a step whether any sentence can
    still improve; here the same question is answered for each sentence.

    Args:
        model: has transformers' generation methods.
        beams: beams per sentence.
        longest: `[batch]`, new tokens at most for each sentence.

    Yields:
        A function that returns `[batch * beams]` bool: the rows of the coming step that count.
    """
    stock = model._beam_search_has_unfinished_sequences
    live = torch.ones(len(longest), dtype=torch.bool, device=longest.device)
    step = 0

    def has_unfinished(
        can_improve: Tensor, finished: Tensor, hits: Tensor, early_stopping: bool | str
    ) -> Any:
        nonlocal step
        step += 1
        closed = finished.all(dim=-1) if early_stopping is True else torch.zeros_like(live)
        live.logical_and_(can_improve.reshape(len(live), -1).any(dim=-1) & ~closed & ~hits.all(dim=-1))
        live.logical_and_(step < longest)
        return stock(can_improve, finished, hits, early_stopping) and bool(live.any())

    model._beam_search_has_unfinished_sequences = has_unfinished
    try:
        yield lambda: live.repeat_interleave(beams)
    finally:
        del model._beam_search_has_unfinished_sequences
