"""Forward and backward passes of many batches, layer by layer, each way through the layers once.

On the way forwards what every layer returns is kept. On the way back each layer is computed once more from what the
layer before it returned, and the gradient of its output becomes that of its input; what other stacks gave it, as an
encoder does to every layer of the decoder, has its gradients summed. Parameters get none: what is differentiated by is
inside of the layers, and is told of its gradients by hooks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from prunecli.architectures.records import Side
from prunecli.modules.sparse_ffn import SparseFFN
from prunecli.modules.trees import leaves, map_tree
from prunecli.running.layerwise.entering import LayerReplay
from prunecli.running.layerwise.parts import Skeleton, Stage
from prunecli.running.layerwise.reading import Loaded, Reader
from prunecli.running.layerwise.sparse import Routed, SparsePasses
from prunecli.running.layerwise.sparse_gradients import SparseGradients
from prunecli.running.layerwise.states import StateStore, Stored
from prunecli.running.layerwise.swaps import bound
from prunecli.running.runner import Pass, ignored

Gradient = list[Stored | None]
"""Of each tensor that a layer returned; None where none came back."""


@dataclass(frozen=True)
class Kept:
    """A tensor that a layer returned.

    Attributes:
        held: where it is.
        differentiable: whether what is differentiated by takes part in it.
    """

    held: Stored
    differentiable: bool


class Tape:
    """Outputs of layers as trees of `Kept`; a tensor that a layer hands on as it got it is kept once.

    Args:
        states: where they are kept.
        device: where they are given back.
    """

    def __init__(self, states: StateStore, device: torch.device) -> None:
        self._states, self._device = states, device
        self._uses: Counter[Stored] = Counter()

    def keep(self, output: Any, given: Mapping[Side, Any], kept: Mapping[Side, Any]) -> Any:
        """Keep a layer's output.

        Args:
            given: what the layer got, by side.
            kept: what that was fetched from.
        """
        known = {
            id(tensor): one
            for side, tree in given.items()
            for tensor, one in zip(leaves(tree, Tensor), leaves(kept[side], Kept), strict=True)
        }

        def put(tensor: Tensor) -> Kept:
            found = known.get(id(tensor)) or Kept(self._states.put(tensor.detach()), tensor.requires_grad)
            self._uses[found.held] += 1
            return found

        return map_tree(output, put, Tensor)

    def fetch(self, tree: Any) -> Any:
        """The output again, its tensors the leaves of a new graph."""

        def get(one: Kept) -> Tensor:
            return self._states.get(one.held).to(self._device).requires_grad_(one.differentiable)

        return map_tree(tree, get, Kept)

    def drop(self, tree: Any) -> None:
        """Give the room of what nobody else needs back."""
        for one in leaves(tree, Kept):
            self._uses[one.held] -= 1
            if not self._uses[one.held]:
                del self._uses[one.held]
                self._states.drop(one.held)


@dataclass
class _Run:
    """One pass on its way.

    Attributes:
        forward: begins it.
        outputs: number of a layer -> what it returned, as the tape keeps it.
        routed: number of a sparse layer -> the outputs of its experts.
        gradients: by side, those of what the last layer that is not yet gone back through returned.
    """

    forward: Pass
    outputs: dict[int, Any] = field(default_factory=dict)
    routed: dict[int, Routed] = field(default_factory=dict)
    gradients: dict[Side, Gradient] = field(default_factory=dict)


class Gradients:
    """Runs passes of a model, and back, while its layers' weights are read one after another.

    Args:
        skeleton: its resident tensors are there; none of its parameters asks for gradients.
        reader: of its checkpoint.
        states: where outputs and gradients are kept.
        make_room: called before a pass is begun, which takes memory for its activations.
    """

    def __init__(
        self,
        skeleton: Skeleton,
        reader: Reader,
        states: StateStore,
        make_room: Callable[[], None] = ignored,
    ) -> None:
        self._reader, self._states = reader, states
        self._device, self._stages = skeleton.device, skeleton.stages
        self._tape = Tape(states, skeleton.device)
        self._replay = LayerReplay(skeleton.stages, self._tape.fetch, make_room)
        self._sparse = SparsePasses(reader, states, self._replay, skeleton.device, keep_attention=False)
        self._sparse_back = SparseGradients(reader, states, skeleton.device)

    def run(
        self,
        passes: Sequence[Pass],
        *,
        start: Callable[[int, Any], Tensor],
        after: Callable[[Stage, int], None] = ignored,
    ) -> None:
        """Run all passes through every layer, and back.

        Args:
            passes: each enters all layers once, in order.
            start: from a pass's number and what it returns to the scalar that is differentiated.
            after: called for each layer and each pass, in order, once on the way forwards and once on the way back.

        Raises:
            CheckpointError: weights cannot be read.
            OutputError: no room for what is kept.
        """
        runs = [_Run(forward) for forward in passes]
        last = len(self._stages) - 1
        with torch.enable_grad(), self._replay.guarded():
            self._reader.want(self._stages[0].block)
            for index in range(last):
                with self._bound(index) as loaded:
                    self._forwards(index, runs, index + 1, after)
                self._reader.give_back(loaded)
            with self._bound(last) as loaded:  # the turn: read once
                self._forwards(last, runs, None, after)
                for number, one in enumerate(runs):
                    self._turn(one, partial(start, number))
                self._back(last, runs, after)
            self._reader.give_back(loaded)
            for index in reversed(range(last)):
                with self._bound(index) as loaded:
                    self._back(index, runs, after)
                self._reader.give_back(loaded)

    @contextmanager
    def _bound(self, index: int) -> Iterator[Loaded]:
        """Inside, the layer that was asked for has its weights, and passes are broken off after it."""
        self._replay.current = index
        loaded = self._reader.take()
        with bound(self._stages[index], loaded):
            yield loaded

    def _inputs(self, index: int, one: _Run) -> dict[Side, Any]:
        """What is kept of the last layer of each side before this one."""
        return {self._stages[n].side: one.outputs[n] for n in range(index) if n in one.outputs}

    def _forwards(
        self, index: int, runs: Sequence[_Run], following: int | None, after: Callable[[Stage, int], None]
    ) -> None:
        stage = self._stages[index]
        if stage.ffn is None:
            self._want(following)
            for number, one in enumerate(runs):
                self._through(index, one)
                after(stage, number)
            return
        passes, kept = [one.forward for one in runs], [self._inputs(index, one) for one in runs]
        routed, wanted = self._sparse.route(stage, stage.ffn, passes, kept, after)
        self._want(following)
        self._sparse.run(stage.ffn, wanted, routed)
        for one, sent in zip(runs, routed, strict=True):
            with self._sparse.answering(stage, stage.ffn, sent):
                self._through(index, one)
            one.routed[index] = sent

    def _want(self, index: int | None) -> None:
        if index is not None:
            self._reader.want(self._stages[index].block)

    def _through(self, index: int, one: _Run) -> None:
        """One pass through the current layer, whose output is kept."""
        given: dict[Side, Any] = {}
        kept = self._inputs(index, one)
        output = self._replay.begin(one.forward, kept, given)
        one.outputs[index] = self._tape.keep(output, given, kept)

    def _turn(self, one: _Run, start: Callable[[Any], Tensor]) -> None:
        """To the end of one pass, and back to what its layers returned."""
        given: dict[Side, Any] = {}
        scalar = start(self._replay.end(one.forward, self._inputs(len(self._stages), one), given))
        if scalar.requires_grad:
            scalar.backward()  # type: ignore[no-untyped-call]
        self._collect(one, given)

    def _back(self, index: int, runs: Sequence[_Run], after: Callable[[Stage, int], None]) -> None:
        stage = self._stages[index]
        self._replay.current = index
        for one in runs:
            self._tape.drop(one.outputs.pop(index))
        if stage.ffn is None:
            self._want_before(index)
            for number, one in enumerate(runs):
                self._differentiate(index, one)
                after(stage, number)
            return
        self._back_sparse(index, stage.ffn, runs)
        for number in range(len(runs)):
            after(stage, number)

    def _want_before(self, index: int) -> None:
        self._want(index - 1 if index else None)

    def _back_sparse(self, index: int, ffn: SparseFFN, runs: Sequence[_Run]) -> None:
        back, routed = self._sparse_back, [one.routed.pop(index) for one in runs]
        wanted = back.want(self._stages[index], ffn, routed)
        self._want_before(index)
        sent = []
        for one, outputs in zip(runs, routed, strict=True):
            with back.asking(ffn, outputs) as asked:
                pairs = self._paired(index, one, {})
                sent.append(asked(pairs))
        back.run(ffn, wanted, sent)
        for one, found in zip(runs, sent, strict=True):
            with back.answering(ffn, found):
                self._differentiate(index, one)
            back.drop(found)

    def _differentiate(self, index: int, one: _Run) -> None:
        """From the gradient of what the current layer returned to that of what it was given."""
        side = self._stages[index].side
        given: dict[Side, Any] = {}
        pairs = self._paired(index, one, given)
        if pairs:
            outputs, gradients = zip(*pairs, strict=True)
            torch.autograd.backward(outputs, gradients)
        for held in one.gradients.pop(side, []):
            if held is not None:
                self._states.drop(held)
        self._collect(one, given)

    def _paired(self, index: int, one: _Run, given: dict[Side, Any]) -> list[tuple[Tensor, Tensor]]:
        """What the current layer returns, computed anew, with its gradients."""
        output = self._replay.begin(one.forward, self._inputs(index, one), given)
        tensors = leaves(output, Tensor)
        gradients = one.gradients.get(self._stages[index].side) or [None] * len(tensors)
        return [
            (tensor, self._states.get(held).to(self._device))
            for tensor, held in zip(tensors, gradients, strict=True)
            if held is not None and tensor.requires_grad
        ]

    def _collect(self, one: _Run, given: Mapping[Side, Any]) -> None:
        """Add the gradients of what a pass was given to those that it has."""
        for side, tree in given.items():
            tensors = leaves(tree, Tensor)
            sums = one.gradients.setdefault(side, [None] * len(tensors))
            for place, tensor in enumerate(tensors):
                if tensor.grad is None:
                    continue
                held, found = sums[place], tensor.grad
                if held is not None:
                    found = self._states.get(held).to(self._device) + found
                sums[place] = self._states.put(found, held)
