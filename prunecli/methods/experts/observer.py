"""What a mixture of experts does while it runs: sums over the real tokens, for one pass at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from prunecli.architectures.records import Side
from prunecli.errors import PruneError, UnsupportedModelError
from prunecli.model.sparse_layer import SparseLayer
from prunecli.modules.loading import sparse_ffns
from prunecli.modules.stock_experts import ExpertUse
from prunecli.modules.tapped_experts import observed_experts
from prunecli.private import UNFINISHED
from prunecli.results.gates import COUNTS, SUMS, TEXT_SUMS, GateSums, OutputArrays

LayerSums = dict[int, GateSums]
"""Number of a sparse layer -> its sums, of one row."""


class Summing:
    """Sums of the passes since the last `take`, on the model's device, in float64, which counts exactly.

    Args:
        layers: the mixtures of the checkpoint that a forward pass runs.

    Attributes:
        names: names of the sums that `take` returns.
        rows: names of the rows that `_add` takes.
    """

    names: tuple[str, ...]
    rows: tuple[str, ...]

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
            for name, values in zip(self.rows, found, strict=True):
                row[name][0, list(layer.experts)] = np.rint(values) if name in COUNTS else values
        self._sums = {}
        return taken

    def _add(self, index: int, tokens: int, sums: Tensor) -> None:
        """Add `[rows, experts]` of a layer."""
        if index in self._sums:
            counted, before = self._sums[index]
            together = sums + before
            if self.rows[-1] == "norm_max":
                together[-1] = torch.maximum(sums[-1], before[-1])
            tokens, sums = tokens + counted, together
        self._sums[index] = tokens, sums


class GateObserver(Summing):
    """Observer that sums what the routers of sparse FFNs do."""

    names = SUMS
    rows = ("gate_sum", "top1", "conf1_sum", "top2", "conf2_sum")
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
        sums = [gates.sum(dim=0, dtype=torch.float64)]
        numbers = torch.arange(gates.shape[1], device=gates.device)
        for rank in range(2):
            # A masked sum, not a scatter: its order, and so its rounding, is fixed on every device.
            chosen = experts[:, rank : rank + 1] == numbers
            sums += [chosen.sum(dim=0).double(), gates.where(chosen, 0.0).sum(dim=0, dtype=torch.float64)]
        self._add(index, len(gates), torch.stack(sums))


class StockObserver(Summing):
    """Observer that sums what the experts of a language model do.

    A token's experts are ranked by the weight that the router gives them, equal ones by their number.

    Args:
        layers: see `Summing`.
        outputs: sums of outputs, which passes add to: (text, layer's name) -> `[original experts, width]` float64. If
            None, outputs are not summed.

    Attributes:
        text: name of the text that the next pass reads.
    """

    names = TEXT_SUMS
    rows = (
        "routed",
        "gate_sum",
        "gate_sq_sum",
        "norm_sum",
        "norm_sq_sum",
        "gate_norm_sum",
        "gate_norm_sq_sum",
        "top1",
        "conf1_sum",
        "top2",
        "conf2_sum",
        "norm_max",
    )

    def __init__(self, layers: Sequence[SparseLayer], outputs: OutputArrays | None = None) -> None:
        super().__init__(layers)
        self.text, self._outputs = "", outputs
        self._real: dict[Side, Tensor] = {}

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

    @contextmanager
    def reading(self, mask: Tensor | None, encoder_mask: Tensor | None = None) -> Iterator[None]:
        """While the block runs a pass, count only the tokens that are 1 in the masks `[batch, seq]`.

        Args:
            mask: tokens of the decoder. If None, all count.
            encoder_mask: tokens of the encoder. If None, all count.
        """
        masks: dict[Side, Tensor | None] = {"decoder": mask, "encoder": encoder_mask}
        for side, found in masks.items():
            if found is not None and not bool(found.all()):
                self._real[side] = found.reshape(-1).bool()
        try:
            yield
        finally:
            self._real.clear()

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
            found, key = use.sums(mask).numpy(), (self.text, layer.name)
            if key not in self._outputs:
                self._outputs[key] = np.zeros((layer.original_experts, found.shape[1]))
            self._outputs[key][np.asarray(layer.experts)] += found
        tokens, ids, product = len(experts), experts.reshape(-1), weights * norms
        by_number = experts.argsort(dim=1, stable=True)
        order = by_number.gather(1, weights.gather(1, by_number).argsort(dim=1, descending=True, stable=True))
        first, second = (
            torch.zeros_like(weights).scatter_(1, order[:, rank : rank + 1], 1.0) for rank in (0, 1)
        )
        # `[tokens x top_k, columns]` of `rows` but the last.
        each = (torch.ones_like(weights), weights, weights**2, norms, norms**2, product, product**2)
        ranked = (first, first * weights, second, second * weights)
        columns = torch.stack((*each, *ranked), dim=-1).flatten(0, 1)
        if routed is not None:
            taken = routed.reshape(-1)
            ids, columns = ids[taken], columns[taken]
        if ids.device.type == "cpu":
            sums = columns.new_zeros(layer.num_experts, columns.shape[1]).index_add_(0, ids, columns)
        else:  # there index_add_ adds in any order
            sums = functional.one_hot(ids, layer.num_experts).to(columns.dtype).T @ columns
        norms = columns[:, self.rows.index("norm_sum")]
        largest = norms.new_zeros(layer.num_experts).scatter_reduce_(0, ids, norms, "amax")
        self._add(index, tokens, torch.cat([sums.T, largest[None]]))
