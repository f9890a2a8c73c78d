"""Passes of many batches forwards, or forwards and back, one layer after another, while the layers' weights are read.

Nothing of a model's forward pass is restated. For each layer, each batch's own forward pass is begun anew; the layers
before it return their stored outputs, so that little but the embeddings is computed twice, and after the layer the pass
ends. In a layer with experts, a pass first ends when its tokens are routed. Then the experts that any token goes to are
read one after another, and each computes its rows of all batches. Then the passes are begun once more, and get the
experts' outputs.

For gradients, what every layer returns is stored on the way forwards. On the way back each layer is computed once more
from what the layer before it returned, and the gradient of its output becomes that of its input. Every layer of a
decoder gets the encoder's output, whose gradients are summed. Parameters get no gradients: hooks inside of the layers
see those of activations. A layer with experts is computed twice on the way back: first for the gradients of the
experts' outputs, which each expert, read again, turns into those of its rows; then, with these, for all the rest of the
layer at once.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from prunecli.architectures.records import Side
from prunecli.modules.grouped import Dispatch, expert_spans, in_threads
from prunecli.modules.hooks import replaced
from prunecli.modules.stages import EmptyModel, Mixture, Stage
from prunecli.running.layerwise.reading import Reader
from prunecli.running.layerwise.states import Snapshots, StateStore, Stored, leaves, map_tree
from prunecli.running.runner import Advance, Group, Observer, Pass, ignored, rehearsing

Outputs = dict[int, Any]
"""Number of a layer -> its output of one pass, with `Stored` in the place of tensors."""
Given = dict[Side, tuple[Any, Any]]
"""Stack -> output of its last layer before the current one, as it is stored and as a pass gets it."""


class StopForward(BaseException):
    """Ends a forward pass early with an output; not an Exception, so that no model code catches it."""


@dataclass
class Routed:
    """Rows that one pass sends to the experts of a layer.

    Attributes:
        rows: `[assignments, d_model]`, sorted by expert; each expert's outputs replace its rows.
        spans: expert -> its first row and its end row, of the experts that have rows.
        shared_out: whether the layer would give each expert to one thread.
        attention: stored outputs of attentions of the layer, by number.
        given: on the way back, the rows `[assignments, d_model]` that the experts got.
        gradients: then those `[assignments, d_model]` of the experts' outputs, in the end of their rows.
    """

    rows: Stored
    spans: dict[int, tuple[int, int]]
    shared_out: bool
    attention: dict[int, Any]
    given: Any = None
    gradients: Any = None


@dataclass
class PassRun:
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


class LayerwiseRun:
    """A group of batches on its way through a model whose layers' weights are read one after another.

    Passes go through one layer at a time, and back; none of the model's parameters asks for gradients.

    Args:
        skeleton: its resident tensors are there.
        reader: of its checkpoint.
        states: stores the layers' outputs and the experts' rows.
        advance: called with 1 whenever a pass is through a layer.
        group: what is run, of which `snapshots` may hold a part.
        snapshots: where the states are written after a layer, to resume from.

    Attributes:
        current: number of the layer after which passes end.
        restored: what `keeping` returned when the snapshot that is resumed was written; None: there is none.
    """

    def __init__(
        self,
        skeleton: EmptyModel,
        reader: Reader,
        states: StateStore,
        advance: Advance,
        group: Group[Any],
        snapshots: Snapshots | None = None,
    ) -> None:
        self._stages, self._device = skeleton.stages, skeleton.device
        self._reader, self._states = reader, states
        self._advance = advance
        self.current = -1
        self._one, self._given = PassRun(ignored), Given()
        self._group, self._snapshots = group, snapshots
        self.restored: Any = None
        self._resumed: tuple[int, list[Outputs]] | None = None
        if snapshots and (header := snapshots.header(group.start)) is not None:
            tree = snapshots.read(states)
            self.restored, self._resumed = tree["kept"], (int(header["stage"]), tree["outputs"])

    def forward(
        self,
        passes: Sequence[Pass],
        *,
        side: Side | None = None,
        observer: Observer | None = None,
        reduce: Callable[[list[Any]], None] = ignored,
        finish: Callable[[int, Any], None] = ignored,
        keeping: Callable[[], Any] = ignored,
    ) -> None:
        """See `InMemory`. Each pass enters the layers of the stack once, in order, and no others.

        What the observer saw of a pass is taken after each layer.

        Args:
            side: the stack that the passes go through. If None, all.
            keeping: returns everything that an interrupted run needs besides the passes' states: tensors from `keep`
                or on the CPU, in tuples, lists and dictionaries with JSON values.

        Raises:
            CheckpointError: weights cannot be read.
            OutputError: no room for the batches' states.
        """
        indices = [n for n, stage in enumerate(self._stages) if side in (None, stage.side)]
        # The number of the last layer that all passes are through, and the outputs of each pass.
        done, outputs = self._resumed or (-1, [{} for _ in passes])
        if done >= 0:
            self._advance(len(passes) * sum(index <= done for index in indices))
        if done > indices[-1]:  # the interrupted run was at a later stack
            return
        self._resumed = None
        runs = [PassRun(*one) for one in zip(passes, outputs, strict=True)]
        ahead = [index for index in indices if index > done]
        with torch.inference_mode(), self.intercepting():
            if runs and ahead:
                self.want(ahead[0])
            for index, following in zip(ahead, [*ahead[1:], -1], strict=False):
                seen, stack = [], self._stages[index].side
                if runs:  # a process without any keeps step with the others
                    with self.loaded(index):
                        for one in self.through(following, runs):
                            for before in [
                                n for n in one.outputs if n != index and self._stages[n].side == stack
                            ]:
                                self.forget(one, before)
                            if index in one.routed:
                                self.free(one.routed.pop(index))
                            if observer is not None:
                                seen.append(observer.take())
                reduce(seen)
                if self._snapshots and self._snapshots.due():
                    header = {"batches": self._group.start, "group": len(self._group.batches), "stage": index}
                    self._snapshots.write(
                        header, {"outputs": [one.outputs for one in runs], "kept": keeping()}, self._states
                    )
            self.current = len(self._stages)
            for number, one in enumerate(runs):
                finish(number, self.run_pass(one)[0])
                for index in list(one.outputs):
                    self.forget(one, index)

    def keep(self, tensor: Tensor) -> Stored:
        """See `InMemory`."""
        return self._states.put(tensor)

    def fetch(self, kept: Stored) -> Tensor:
        """See `InMemory`."""
        return self._states.get(kept).to(self._device)

    def intercepting(self) -> AbstractContextManager[None]:
        """Within the block, layers before the current one return their stored outputs."""
        return replaced({n: stage.module for n, stage in enumerate(self._stages)}, self._enter)

    def run_pass(self, one: PassRun) -> tuple[Any, Given]:
        """Run a pass until the current layer returns or raises `StopForward`; if all layers are done, to its end.

        Returns:
            The output of the layer, of `StopForward`, or of the pass; and the outputs of layers that it got.
        """
        given = Given()
        self._one, self._given = one, given
        try:
            result = one.forward()
        except StopForward as stopped:
            return stopped.args[0], given
        finally:
            self._given = {}
        if self.current < len(self._stages):
            raise RuntimeError(f"{self._stages[self.current].name} was not entered")
        return result, given

    def want(self, index: int) -> None:
        """Ask the reader for a layer, unless the number is -1."""
        if index >= 0:
            self._reader.want(self._stages[index].block)

    @contextmanager
    def loaded(self, index: int) -> Iterator[None]:
        """Within the block the layer, which the reader was asked for, has its weights and is the current one."""
        self.current = index
        with self._reader.next_block() as tensors, bound(self._stages[index], tensors):
            yield

    def through(self, following: int, runs: Sequence[PassRun]) -> Iterator[PassRun]:
        """Send all passes through the current layer, and store what it returns in their `outputs`.

        Args:
            following: the layer to ask the reader for, once the experts of this one are asked for.

        Yields:
            Each pass, with what it sent to the experts in its `routed`, which the caller frees.
        """
        stage = self._stages[self.current]
        if stage.mixture is None:
            self.want(following)
        else:
            wanted: dict[int, None] = {}
            for number, one in enumerate(runs):
                routed = one.routed[self.current] = self._route(stage, stage.mixture, one, len(runs) - number)
                self._want_experts(stage.mixture, routed, wanted)
            self.want(following)
            self.run_experts(stage.mixture, wanted, [one.routed[self.current] for one in runs])
        for one in runs:
            with self._answering(stage, one):
                self._run_through(one)
            yield one
            self._advance(1)

    def _want_experts(self, mixture: Mixture, routed: Routed, wanted: dict[int, None]) -> None:
        """Ask the reader for the experts of a pass that are not `wanted` yet."""
        for expert in routed.spans:
            if expert not in wanted:
                self._reader.want(mixture.block(expert))
                wanted[expert] = None

    def run_experts(self, mixture: Mixture, wanted: Iterable[int], routed: Sequence[Routed]) -> None:
        """Replace the rows of all passes by the outputs of the experts, which the reader was asked for."""

        def run(expert: int, tensors: Sequence[Tensor], one: Routed) -> None:
            start, end = one.spans[expert]
            rows = self._states.rows(one.rows, start, end).to(self._device, tensors[0].dtype)
            self._states.write(one.rows, start, mixture.run(rows, tensors))

        for expert in wanted:
            reached = [one for one in routed if expert in one.spans]
            with self._reader.next_block() as tensors:
                own = partial(run, expert, tensors)
                in_threads(own, [one for one in reached if one.shared_out])
                for one in reached:
                    if not one.shared_out:
                        own(one)

    def forget(self, one: PassRun, index: int) -> None:
        """Free the tensors that the layer alone returned."""
        for held in {*leaves(one.outputs.pop(index), Stored)} - {*leaves(one.outputs, Stored)}:
            self._states.drop(held)

    def free(self, routed: Routed) -> None:
        """Free everything that is stored of a pass in a layer with experts."""
        held = (routed.rows, routed.attention, routed.given, routed.gradients)
        map_tree(held, self._states.drop, Stored)

    def _enter(self, index: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if index == self.current:
            raise StopForward(forward(*args, **kwargs))
        if index > self.current:
            raise RuntimeError(f"{self._stages[index].name} was entered too early")
        side = self._stages[index].side
        if side not in self._given:
            outputs = self._one.outputs
            last = max(n for n in outputs if n < self.current and self._stages[n].side == side)
            self._given[side] = outputs[last], self._fetch(outputs[last])
        return self._given[side][1]

    def _fetch(self, tree: Any) -> Any:
        return map_tree(
            tree,
            lambda held: self.fetch(held).requires_grad_(held.requires_grad),
            Stored,
        )

    def _run_through(self, one: PassRun) -> None:
        """Run a pass through the current layer and store its output."""
        output, given = self.run_pass(one)
        known: dict[int, Stored] = {}
        if torch.is_grad_enabled():  # else a layer may change in place what it hands on
            for stored, tree in given.values():
                pairs = zip(leaves(tree, Tensor), leaves(stored, Stored), strict=True)
                known |= {id(tensor): held for tensor, held in pairs}
        one.outputs[self.current] = map_tree(
            output, lambda tensor: known.get(id(tensor)) or self.keep(tensor), Tensor
        )

    def _route(self, stage: Stage, mixture: Mixture, one: PassRun, to_come: int) -> Routed:
        """Run a pass up to the experts; `to_come` passes, this one among them, still need memory."""
        attention: dict[int, Any] = {}

        def leave(rows: Tensor, plan: Dispatch) -> Tensor:
            raise StopForward((rows, plan.sizes))

        def attend(number: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            """Store the output of one of the layer's attentions if there is memory for it."""
            output = forward(*args, **kwargs)
            # (output, weights): no layer reads the weights, and most attention functions return none.
            found = (output[0], None) if isinstance(output, tuple) and len(output) == 2 else output
            rows = mixture.layer.top_k * mixture.dtype.itemsize  # which each pass will store, too
            nbytes = sum(
                leaf.numel() * (rows + len(stage.attentions) * leaf.itemsize)
                for leaf in leaves(found, Tensor)
            )
            if self._states.free_memory > to_come * nbytes:
                attention[number] = map_tree(found, self.keep, Tensor)
            return output

        attentions = () if torch.is_grad_enabled() else stage.attentions
        with (
            swapped(mixture.module, "runner", leave),
            swapped(mixture.module, "observer", None),
            replaced(dict(enumerate(attentions)), attend),
            rehearsing(),
        ):
            (rows, counts), _ = self.run_pass(one)
        shared_out = self._device.type == "cpu" and mixture.shares_out(counts)
        stored = self.keep(rows.detach().to(mixture.dtype))
        spans = {expert: (start, end) for expert, start, end in expert_spans(counts)}
        return Routed(stored, spans, shared_out, attention)

    @contextmanager
    def _answering(self, stage: Stage, one: PassRun) -> Iterator[None]:
        """Within the block, a pass gets the experts' outputs and the attentions' that are stored."""
        if stage.mixture is None:
            yield
            return
        routed = one.routed[self.current]

        with (
            swapped(
                stage.mixture.module,
                "runner",
                lambda rows, _plan: self._states.rows(routed.rows, 0, len(rows)).to(self._device),
            ),
            replaced(
                {number: stage.attentions[number] for number in routed.attention},
                lambda number, *_, **__: self._fetch(routed.attention[number]),
            ),
        ):
            yield

    def backward(self, passes: Sequence[Pass], start: Callable[[int, Any], Tensor]) -> None:
        """See `InMemory`; all passes go through every layer once, and back.

        Args:
            passes: each enters all layers once, in order.
            start: from a pass's number and what it returns to the scalar that is differentiated.

        Raises:
            CheckpointError: weights cannot be read.
            OutputError: no room for what is kept.
        """
        runs, last = [*map(PassRun, passes)], len(self._stages) - 1
        with torch.enable_grad(), self.intercepting():
            self.want(0)
            for index in range(last):
                with self.loaded(index):
                    deque(self.through(index + 1, runs), 0)
            with self.loaded(last):  # read once for both ways
                deque(self.through(-1, runs), 0)
                self.current = len(self._stages)
                for number, one in enumerate(runs):
                    self._turn(one, partial(start, number))
                self.current = last
                self._back(runs)
            for index in reversed(range(last)):
                with self.loaded(index):
                    self._back(runs)

    def _back(self, runs: Sequence[PassRun]) -> None:
        stage = self._stages[self.current]
        for one in runs:
            self.forget(one, self.current)
        if stage.mixture is None:
            self.want(self.current - 1)
        else:
            self._back_experts(stage, stage.mixture, runs)
        for one in runs:
            self._differentiate(stage, one)
            if stage.mixture:
                self.free(one.routed.pop(self.current))
            self._advance(1)

    def _turn(self, one: PassRun, start: Callable[[Any], Tensor]) -> None:
        """Run one pass to its end, and back to the outputs of its layers."""
        result, given = self.run_pass(one)
        scalar = start(result)
        if scalar.requires_grad:
            scalar.backward()  # type: ignore[no-untyped-call]
        self._collect(one, given)

    def _differentiate(self, stage: Stage, one: PassRun) -> None:
        """From the gradients of the current layer's output, and of the experts' rows, to those of its inputs."""
        sent: list[Tensor] = []
        routed: Any = one.routed.get(self.current)

        def answer(rows: Tensor, _plan: Dispatch) -> Tensor:
            sent.append(rows)
            return self.fetch(routed.rows)

        pairs, given = self._paired(stage, one, answer)
        if pairs:
            pairs += [
                (rows, self.fetch(routed.gradients).to(rows.dtype)) for rows in sent if rows.requires_grad
            ]
            outputs, gradients = zip(*pairs, strict=True)
            torch.autograd.backward(outputs, gradients)
        for held in one.gradients.pop(stage.side, []):
            if held is not None:
                self._states.drop(held)
        self._collect(one, given)

    def _back_experts(self, stage: Stage, mixture: Mixture, runs: Sequence[PassRun]) -> None:
        """From the gradients of the layer's outputs to those of the experts' rows."""
        wanted: dict[int, None] = {}
        for one in runs:
            self._want_experts(mixture, one.routed[self.current], wanted)
        self.want(self.current - 1)
        for one in runs:
            self._send(stage, mixture, one)
        watcher = getattr(mixture.module, "watcher", None) or ignored
        for expert in wanted:
            with self._reader.next_block() as tensors:
                place = self._device, tensors[0].dtype
                for one in runs:
                    own = one.routed[self.current]
                    if expert not in own.spans:
                        continue
                    start, end = own.spans[expert]
                    rows = self._states.rows(own.given, start, end).to(*place).detach().requires_grad_()
                    made = mixture.run(rows, tensors, partial(watcher, expert))
                    gradient = self._states.rows(own.gradients, start, end).to(*place)
                    (found,) = torch.autograd.grad(made, rows, gradient)
                    self._states.write(own.gradients, start, found)

    def _send(self, stage: Stage, mixture: Mixture, one: PassRun) -> None:
        """Compute the layer with the experts' outputs that are stored, for the gradients of these."""
        routed = one.routed[self.current]
        outputs = self.fetch(routed.rows).requires_grad_()

        def answer(rows: Tensor, _plan: Dispatch) -> Tensor:
            routed.given = self.keep(rows.detach().to(mixture.dtype))
            return outputs

        with rehearsing():
            pairs, _ = self._paired(stage, one, answer)
        gradient = torch.zeros_like(outputs)
        if pairs:
            made, given = zip(*pairs, strict=True)
            (gradient,) = torch.autograd.grad(made, outputs, given)
        routed.gradients = self.keep(gradient)

    def _paired(
        self, stage: Stage, one: PassRun, answer: Callable[[Tensor, Dispatch], Tensor]
    ) -> tuple[list[tuple[Tensor, Tensor]], Given]:
        """Outputs of the current layer, computed again, with their gradients; and the stored outputs that it got.

        Args:
            answer: from the rows of experts to their outputs.
        """
        with swapped(stage.mixture.module, "runner", answer) if stage.mixture else nullcontext():
            output, given = self.run_pass(one)
        tensors = leaves(output, Tensor)
        gradients = one.gradients.get(stage.side) or [None] * len(tensors)
        pairs = [
            (tensor, self.fetch(held))
            for tensor, held in zip(tensors, gradients, strict=True)
            if held is not None and tensor.requires_grad
        ]
        return pairs, given

    def _collect(self, one: PassRun, given: Given) -> None:
        """Add the gradients of what a pass was given to those that it has."""
        for side, (_, tree) in given.items():
            tensors = leaves(tree, Tensor)
            sums = one.gradients.setdefault(side, [None] * len(tensors))
            for place, tensor in enumerate(tensors):
                found, held = tensor.grad, sums[place]
                if found is None:
                    continue
                if held is not None:
                    found = self.fetch(held) + found
                    self._states.drop(held)
                sums[place] = self.keep(found)


@contextmanager
def bound(stage: Stage, tensors: Sequence[Tensor]) -> Iterator[None]:
    """Within the block, the layer's parameters and buffers are the tensors that were read."""
    before = [target.tensor for target in stage.targets]
    for target, tensor in zip(stage.targets, tensors, strict=True):
        target.put(tensor)
    try:
        yield
    finally:
        for target, tensor in zip(stage.targets, before, strict=True):
            setattr(target.module, target.attribute, tensor)


@contextmanager
def swapped(module: nn.Module, attribute: str, value: Any) -> Iterator[None]:
    """Within the block, the attribute has this value."""
    before = getattr(module, attribute, None)
    setattr(module, attribute, value)
    try:
        yield
    finally:
        setattr(module, attribute, before)
