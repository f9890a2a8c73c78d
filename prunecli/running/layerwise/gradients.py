"""Forward and backward passes of many batches, layer by layer, each way through the layers once.

On the way forwards what every layer returns is stored. On the way back each layer is computed once more from what the
layer before it returned, and the gradient of its output becomes that of its input. Every layer of a decoder gets the
encoder's output, whose gradients are summed. Parameters get no gradients: hooks inside of the layers see those of
activations.

A layer with experts is computed twice on the way back: first for the gradients of the experts' outputs, which each
expert, read again, turns into those of its rows; then, with these, for all the rest of the layer at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from prunecli.architectures.records import Side
from prunecli.modules.grouped import Groups
from prunecli.modules.stages import Mixture, Stage
from prunecli.running.layerwise.forward import LayerPasses, Outputs, Routed, swapped
from prunecli.running.layerwise.states import Stored, leaves
from prunecli.running.runner import Pass, ignored, rehearsing


@dataclass
class _Run:
    """One pass on its way.

    Attributes:
        forward: begins it.
        outputs: of its layers.
        routed: number of a layer with experts -> the outputs of its experts.
        gradients: by stack, those of the tensors that its last layer not yet gone back through returned.
    """

    forward: Pass
    outputs: Outputs = field(default_factory=dict)
    routed: dict[int, Routed] = field(default_factory=dict)
    gradients: dict[Side, list[Stored | None]] = field(default_factory=dict)


@dataclass(frozen=True)
class _Sent:
    """One pass on its way back through the experts of a layer.

    Attributes:
        routed: its rows hold the experts' outputs.
        rows: `[assignments, d_model]`, which the experts got.
        gradients: `[assignments, d_model]`, of the experts' outputs, then of their rows.
    """

    routed: Routed
    rows: Stored
    gradients: Stored


class Gradients(LayerPasses):
    """Sends passes through all layers and back; none of the model's parameters asks for gradients."""

    def backward(self, passes: Sequence[Pass], start: Callable[[int, Any], Tensor]) -> None:
        """See `InMemory`; all passes go through every layer once, and back.

        Args:
            passes: each enters all layers once, in order.
            start: from a pass's number and what it returns to the scalar that is differentiated.

        Raises:
            CheckpointError: weights cannot be read.
            OutputError: no room for what is kept.
        """
        runs, last = [_Run(forward) for forward in passes], len(self._stages) - 1
        with torch.enable_grad(), self.intercepting():
            self.want(0)
            for index in range(last):
                with self.loaded(index):
                    self._forwards(runs)
            with self.loaded(last):  # read once for both ways
                self._forwards(runs)
                self.current = len(self._stages)
                for number, one in enumerate(runs):
                    self._turn(one, partial(start, number))
                self.current = last
                self._back(runs)
            for index in reversed(range(last)):
                with self.loaded(index):
                    self._back(runs)

    def _forwards(self, runs: Sequence[_Run]) -> None:
        passes, outputs = [one.forward for one in runs], [one.outputs for one in runs]
        for one, routed in zip(runs, self.through(self.current + 1, passes, outputs), strict=True):
            if routed is not None:
                one.routed[self.current] = routed

    def _back(self, runs: Sequence[_Run]) -> None:
        stage, sent = self._stages[self.current], list[_Sent]()
        for one in runs:
            self.forget(one.outputs, self.current)
        if stage.mixture is None:
            self.want(self.current - 1)
        else:
            sent = self._back_experts(stage, stage.mixture, runs)
        for number, one in enumerate(runs):
            with self._replying(stage.mixture, sent[number]) if stage.mixture else nullcontext():
                self._differentiate(stage, one)
            if sent:
                self.free(sent[number].routed)
                self._states.drop(sent[number].rows)
                self._states.drop(sent[number].gradients)
            self._advance(1)

    def _turn(self, one: _Run, start: Callable[[Any], Tensor]) -> None:
        """Run one pass to its end, and back to the outputs of its layers."""
        result, given = self.run_pass(one.forward, one.outputs)
        scalar = start(result)
        if scalar.requires_grad:
            scalar.backward()  # type: ignore[no-untyped-call]
        self._collect(one, given)

    def _differentiate(self, stage: Stage, one: _Run) -> None:
        """From the gradients of the current layer's output to those of its inputs."""
        pairs, given = self._paired(stage, one)
        if pairs:
            outputs, gradients = zip(*pairs, strict=True)
            torch.autograd.backward(outputs, gradients)
        for held in one.gradients.pop(stage.side, []):
            if held is not None:
                self._states.drop(held)
        self._collect(one, given)

    def _back_experts(self, stage: Stage, mixture: Mixture, runs: Sequence[_Run]) -> list[_Sent]:
        """From the gradients of the layer's outputs to those of the experts' rows."""
        routed = [one.routed.pop(self.current) for one in runs]
        numbers = range(mixture.layer.num_experts)
        wanted = [number for number in numbers if any(one.count(number) for one in routed)]
        for number in wanted:
            self._reader.want(mixture.block(number))
        self.want(self.current - 1)
        sent = [self._send(stage, mixture, one, own) for one, own in zip(runs, routed, strict=True)]
        watcher = getattr(mixture.module, "watcher", None) or ignored
        for expert, tensors in self.experts(wanted):
            place = self._device, tensors[0].dtype
            for one in sent:
                start, end = one.routed.span(expert)
                if start == end:
                    continue
                rows = self._states.rows(one.rows, start, end).to(*place).detach().requires_grad_()
                made = mixture.run(rows, tensors, partial(watcher, expert))
                gradient = self._states.rows(one.gradients, start, end).to(*place)
                (found,) = torch.autograd.grad(made, rows, gradient)
                self._states.write(one.gradients, start, found)
        return sent

    def _send(self, stage: Stage, mixture: Mixture, one: _Run, routed: Routed) -> _Sent:
        """Compute the layer with the experts' outputs that are stored, for the gradients of these."""
        outputs = self._states.get(routed.rows).to(self._device).requires_grad_()
        stored = []

        def answer(rows: Tensor, _groups: Groups) -> Tensor:
            stored.append(self._states.put(rows.detach().to(mixture.dtype)))
            return outputs

        with swapped(mixture.module, "runner", answer), rehearsing():
            pairs, _ = self._paired(stage, one)
        gradient = torch.zeros_like(outputs)
        if pairs:
            made, given = zip(*pairs, strict=True)
            (gradient,) = torch.autograd.grad(made, outputs, given)
        return _Sent(routed, stored[0], self._states.put(gradient))

    def _replying(self, mixture: Mixture, sent: _Sent) -> AbstractContextManager[None]:
        """Within the block, rows become the experts' outputs, and the gradients of outputs become those of rows."""

        def answer(rows: Tensor, _groups: Groups) -> Tensor:
            outputs = self._states.get(sent.routed.rows).to(self._device)
            gradients = self._states.get(sent.gradients).to(self._device, rows.dtype)
            made: Tensor = _Answer.apply(rows, outputs, gradients)  # type: ignore[no-untyped-call]
            return made

        return swapped(mixture.module, "runner", answer)

    def _paired(self, stage: Stage, one: _Run) -> tuple[list[tuple[Tensor, Tensor]], dict[Side, Any]]:
        """Outputs of the current layer, computed again, with their gradients; and the stored outputs that it got."""
        output, given = self.run_pass(one.forward, one.outputs)
        tensors = leaves(output, Tensor)
        gradients = one.gradients.get(stage.side) or [None] * len(tensors)
        pairs = [
            (tensor, self._states.get(held).to(self._device))
            for tensor, held in zip(tensors, gradients, strict=True)
            if held is not None and tensor.requires_grad
        ]
        return pairs, given

    def _collect(self, one: _Run, given: Mapping[Side, Any]) -> None:
        """Add the gradients of what a pass was given to those that it has."""
        for side, tree in given.items():
            tensors = leaves(tree, Tensor)
            sums = one.gradients.setdefault(side, [None] * len(tensors))
            for place, tensor in enumerate(tensors):
                found, held = tensor.grad, sums[place]
                if found is None:
                    continue
                if held is not None:
                    found = self._states.get(held).to(self._device) + found
                    self._states.drop(held)
                sums[place] = self._states.put(found)


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
