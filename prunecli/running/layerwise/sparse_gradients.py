"""Back through the experts of a sparse layer, which are read one after another, each for all passes.

The layer is computed twice: first to find the gradients of the experts' outputs, which each expert turns into those of
its rows; then, these at hand, to go back through all the rest of the layer at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from prunecli.modules.grouped import Groups
from prunecli.modules.sparse_ffn import SparseFFN
from prunecli.running.layerwise.parts import Stage
from prunecli.running.layerwise.reading import Reader
from prunecli.running.layerwise.sparse import Routed
from prunecli.running.layerwise.states import StateStore, Stored
from prunecli.running.layerwise.swaps import swapped

Pairs = Sequence[tuple[Tensor, Tensor]]
"""What a layer returned, and its gradients."""


@dataclass(frozen=True)
class Sent:
    """One pass on its way back through the experts.

    Attributes:
        routed: its rows hold the experts' outputs.
        rows: `[assignments, d_model]` float32: what the experts were given.
        gradients: `[assignments, d_model]` float32: of the experts' outputs, then of their rows.
    """

    routed: Routed
    rows: Stored
    gradients: Stored


class SparseGradients:
    """Goes back through the experts of sparse layers.

    Args:
        reader: of the experts.
        states: where rows and gradients are kept.
        device: to compute on.
    """

    def __init__(self, reader: Reader, states: StateStore, device: torch.device) -> None:
        self._reader, self._states, self._device = reader, states, device

    def want(self, stage: Stage, ffn: SparseFFN, routed: Sequence[Routed]) -> list[int]:
        """Ask the reader for the experts that any pass goes to; returns them, in that order."""
        wanted = [number for number in range(ffn.num_experts) if any(one.goes_to(number) for one in routed)]
        for number in wanted:
            self._reader.want(stage.expert(number))
        return wanted

    @contextmanager
    def asking(self, ffn: SparseFFN, routed: Routed) -> Iterator[Callable[[Pairs], Sent]]:
        """Inside, the layer computes with the outputs that are kept; what is yielded asks for their gradients."""
        found: list[tuple[Tensor, Stored]] = []

        def answer(rows: Tensor, _groups: Groups) -> Tensor:
            outputs = self._states.get(routed.rows).to(self._device).requires_grad_()
            found.append((outputs, self._states.put(rows.float())))
            return outputs

        def ask(pairs: Pairs) -> Sent:
            ((outputs, rows),) = found
            gradient = torch.zeros_like(outputs)
            if pairs:
                made, given = zip(*pairs, strict=True)
                (gradient,) = torch.autograd.grad(made, outputs, given)
            found.clear()
            return Sent(routed, rows, self._states.put(gradient))

        with swapped(ffn, "runner", answer), swapped(ffn, "observer", None):
            yield ask

    def run(self, ffn: SparseFFN, wanted: Sequence[int], sent: Sequence[Sent]) -> None:
        """The experts, one after another, each on its rows of every pass."""
        for expert in wanted:
            loaded = self._reader.take()
            first, first_bias, second, second_bias = loaded.tensors
            place = self._device, first.dtype
            for one in sent:
                if not one.routed.goes_to(expert):
                    continue
                start, end = one.routed.span(expert)
                rows = self._states.rows(one.rows, start, end).to(*place).detach().requires_grad_()
                inner = ffn.activation(functional.linear(rows, first, first_bias))
                made = functional.linear(inner, second, second_bias)
                gradient = self._states.rows(one.gradients, start, end).to(*place)
                (found,) = torch.autograd.grad(made, rows, gradient)
                self._states.write(one.gradients, start, found)
            self._reader.give_back(loaded)

    @contextmanager
    def answering(self, ffn: SparseFFN, sent: Sent) -> Iterator[None]:
        """Inside, the layer computes with the outputs that are kept, and their gradients become those of the rows."""

        def answer(rows: Tensor, _groups: Groups) -> Tensor:
            outputs = self._states.get(sent.routed.rows).to(self._device)
            gradients = self._states.get(sent.gradients).to(self._device, rows.dtype)
            made: Tensor = _Answer.apply(rows, outputs, gradients)  # type: ignore[no-untyped-call]
            return made

        with swapped(ffn, "runner", answer), swapped(ffn, "observer", None):
            yield

    def drop(self, sent: Sent) -> None:
        """Give all room back."""
        for held in (sent.routed.rows, sent.rows, sent.gradients):
            self._states.drop(held)


class _Answer(torch.autograd.Function):
    """Rows become outputs that were computed elsewhere, and so were the gradients of the rows."""

    @staticmethod
    def forward(ctx: Any, _rows: Tensor, outputs: Tensor, gradients: Tensor) -> Tensor:
        ctx.save_for_backward(gradients)
        return outputs

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None, None]:
        (gradients,) = ctx.saved_tensors
        return gradients, None, None
