"""What the experts of a language model do while it runs: sums over the real tokens, for one pass at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from prunecli.architectures.records import Side
from prunecli.errors import PruneError, UnsupportedModelError
from prunecli.methods.experts.observer import LayerSums
from prunecli.model.sparse_layer import SparseLayer
from prunecli.modules.stock_experts import ExpertUse
from prunecli.modules.tapped_experts import observed_experts
from prunecli.results.gate_sums import COUNTS, TEXT_SUMS, GateSums

COLUMNS = (
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
)
"""The sums of an expert, as `_columns` has them of each of its tokens."""


class StockObserver:
    """Sums what experts do, until `take`; on the model's device, in float64. An `Observer`.

    A token's experts are ranked by the weight that the router gives them, equal ones by their number.

    Args:
        layers: the mixtures of the checkpoint that a forward pass runs.
        outputs: what outputs are added to, too: text, layer's name -> `[original experts, width]` float64.

    Attributes:
        text: name of the text that the next pass reads.
    """

    def __init__(
        self, layers: Sequence[SparseLayer], outputs: dict[tuple[str, str], NDArray[np.float64]] | None = None
    ) -> None:
        self.text = ""
        self._layers, self._outputs = layers, outputs
        self._sums: dict[int, tuple[int, Tensor, Tensor]] = {}
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
                if self._outputs is not None:
                    module.counted = partial(self._counted, self._layers[index].side)
            yield

    @contextmanager
    def reading(self, mask: Tensor | None, encoder_mask: Tensor | None = None) -> Iterator[None]:
        """While the block runs a pass, the tokens count that are 1 in `mask` `[batch, seq]`; None: all.

        Args:
            encoder_mask: the same of the encoder's tokens, where there is one.
        """
        masks: dict[Side, Tensor | None] = {"decoder": mask, "encoder": encoder_mask}
        self._real = {
            side: found.reshape(-1).bool()
            for side, found in masks.items()
            if found is not None and not bool(found.all())
        }
        try:
            yield
        finally:
            self._real = {}

    def take(self) -> LayerSums:
        """The sums since the last call, `[1]` and `[1, experts]` in original expert ids, of layers that ran.

        Raises:
            PruneError: an expert's output is not finite.
        """
        taken = {}
        for index, (tokens, sums, largest) in self._sums.items():
            layer = self._layers[index]
            ids = np.asarray(layer.experts)
            found = dict(zip(COLUMNS, sums.cpu().numpy().T, strict=True), norm_max=largest.cpu().numpy())
            taken[index] = row = GateSums.zeros(1, layer.original_experts, TEXT_SUMS)
            row.tokens[0] = tokens
            for name, values in found.items():
                if not np.isfinite(values).all():
                    raise PruneError(
                        f"{layer.name}: the output of an expert is not finite",
                        "Compute with --dtype float32.",
                    )
                getattr(row, name)[0, ids] = np.rint(values) if name in COUNTS else values
        self._sums = {}
        return taken

    def _observe(self, index: int, use: ExpertUse) -> None:
        experts, weights, norms, routed = use.experts, use.weights.double(), use.norms.double(), use.routed
        layer = self._layers[index]
        if (mask := self._real.get(layer.side)) is not None:
            real = mask.to(experts.device)
            experts, weights, norms = experts[real], weights[real], norms[real]
            routed = None if routed is None else routed[real]
        if self._outputs is not None:
            if use.output_sums is None:
                raise UnsupportedModelError(
                    f"{layer.name}: experts of this kind hand out no outputs", "Leave --mean-outputs out."
                )
            found, key = use.output_sums.numpy(), (self.text, layer.name)
            if key not in self._outputs:
                self._outputs[key] = np.zeros((layer.original_experts, found.shape[1]))
            self._outputs[key][np.asarray(layer.experts)] += found
        tokens, ids, columns = len(experts), experts.reshape(-1), _columns(experts, weights, norms)
        norms = norms.reshape(-1)
        if routed is not None:
            taken = routed.reshape(-1)
            ids, columns, norms = ids[taken], columns[taken], norms[taken]
        if ids.device.type == "cpu":
            sums = columns.new_zeros(layer.num_experts, columns.shape[1]).index_add_(0, ids, columns)
        else:  # there index_add_ adds in any order
            sums = functional.one_hot(ids, layer.num_experts).to(columns.dtype).T @ columns
        largest = norms.new_zeros(layer.num_experts).scatter_reduce_(0, ids, norms, "amax")
        if (before := self._sums.get(index)) is not None:
            tokens, sums = tokens + before[0], sums + before[1]
            largest = torch.maximum(largest, before[2])
        self._sums[index] = tokens, sums, largest

    def _counted(self, side: Side) -> Tensor | None:
        return self._real.get(side)


def _columns(experts: Tensor, gates: Tensor, norms: Tensor) -> Tensor:
    """`[tokens x top_k, columns]` float64 of `COLUMNS`, from `[tokens, top_k]` each."""
    by_number = experts.argsort(dim=1, stable=True)
    order = by_number.gather(1, gates.gather(1, by_number).argsort(dim=1, descending=True, stable=True))
    first, second = (torch.zeros_like(gates).scatter_(1, order[:, rank : rank + 1], 1.0) for rank in (0, 1))
    product = gates * norms
    columns = (torch.ones_like(gates), gates, gates**2, norms, norms**2, product, product**2)
    return torch.stack((*columns, first, first * gates, second, second * gates), dim=-1).flatten(0, 1)
