"""Forward passes of many batches, layer by layer.

Nothing of a model's forward pass is restated. For each layer, each batch's own forward pass is begun anew; the layers
before it answer with what the last of them returned before, so that little but the embeddings is computed twice, and
after the layer the pass is broken off. In a sparse layer a pass is broken off once more, at the experts: these are gone
through one at a time, each for all batches; then the pass is begun once more, its attention answering as before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from prunecli.architectures.records import Side
from prunecli.modules.layerwise.parts import Skeleton, Stage
from prunecli.modules.layerwise.reading import Loaded, Reader
from prunecli.modules.layerwise.states import Held, States
from prunecli.modules.layerwise.swaps import bound, replaced, runner, unobserved
from prunecli.modules.layerwise.trees import leaves, map_tree
from prunecli.modules.sparse_ffn import SparseFFN
from prunecli.modules.threads import in_threads

Pass = Callable[[], Any]
"""One batch's forward pass, with `model` of a `Skeleton`; begun once for each layer and more, it must do the same each
time, and use no cache of keys and values."""


class _Left(BaseException):
    """Breaks a forward pass off; not an Exception, so that nothing in between takes it for one."""

    def __init__(self, output: Any = None) -> None:
        super().__init__()
        self.output = output


@dataclass
class _Routed:
    """What one pass sends to the experts of a sparse layer.

    Attributes:
        rows: `[assignments, d_model]` float32, sorted by expert; each expert's outputs take the place of its rows.
        starts: first row of each expert, and the end of the last.
        shared_out: whether the layer would share the experts out to threads.
        attention: outputs of those of the layer's attentions that are kept, by number, as trees of `Held`.
    """

    rows: Held
    starts: list[int]
    shared_out: bool
    attention: dict[int, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Begun:
    """How far a run has come.

    Attributes:
        stage: number of the last layer that all passes are through; -1: none.
        outputs: of each pass, by side, what the last layer returned, as a tree of `Held`.
    """

    stage: int
    outputs: list[dict[Side, Any]]


class LayerMajor:
    """Runs forward passes of a model whose layers' weights are read one after another.

    Args:
        skeleton: its resident tensors are there.
        reader: of its checkpoint.
        states: where the batches are kept between two layers.
        make_room: called before a pass is begun, which takes memory for its activations.
    """

    def __init__(
        self,
        skeleton: Skeleton,
        reader: Reader,
        states: States,
        make_room: Callable[[], None] = lambda: None,
    ) -> None:
        self._skeleton, self._reader, self._states = skeleton, reader, states
        self._make_room = make_room
        self._device = skeleton.device
        self._stages = skeleton.stages
        self._current = -1
        self._outputs: dict[Side, Any] = {}

    def run(
        self,
        passes: Sequence[Pass],
        *,
        sides: Sequence[Side] = ("encoder", "decoder"),
        finish: Callable[[int, Any], None] = lambda _number, _result: None,
        after: Callable[[Stage, int], None] = lambda _stage, _number: None,
        begun: Begun | None = None,
        layer_done: Callable[[Begun], None] = lambda _begun: None,
    ) -> None:
        """Run all passes, through every layer of `sides` once.

        Args:
            passes: each enters these layers once, in order, and no others.
            sides: stacks that the passes go through.
            finish: called with the number of each pass, in order, and what it returns.
            after: called for each layer and each pass, in order, once it has been through the layer (in a sparse
                layer: through the router).
            begun: of an interrupted run of the same passes, to go on from; its states are in `states`.
            layer_done: called after each layer with what `begun` would need.

        Raises:
            CheckpointError: weights cannot be read.
            OutputError: no room for the batches' states.
        """
        begun = begun or Begun(-1, [{} for _ in passes])
        kept = begun.outputs
        chosen = [
            index for index, stage in enumerate(self._stages) if stage.side in sides and index > begun.stage
        ]
        with torch.inference_mode(), self._intercepted():
            if chosen:
                self._reader.want(self._stages[chosen[0]].block)
            for index, following in zip(chosen, [*chosen, None][1:], strict=True):
                self._current = index
                stage = self._stages[index]
                loaded = self._reader.take()
                with bound(stage, loaded):
                    if stage.ffn is None:
                        self._want(following)
                        for number, forward in enumerate(passes):
                            self._through(stage, forward, kept[number])
                            after(stage, number)
                    else:
                        self._through_sparse(stage, stage.ffn, passes, kept, after, following)
                self._reader.give_back(loaded)
                layer_done(Begun(index, kept))
            self._current = len(self._stages)
            for number, forward in enumerate(passes):
                self._outputs = kept[number]
                finish(number, forward())
                for tree in kept[number].values():
                    map_tree(tree, self._states.drop, Held)
                kept[number] = {}

    def _want(self, index: int | None) -> None:
        if index is not None:
            self._reader.want(self._stages[index].block)

    def _through(self, stage: Stage, forward: Pass, outputs: dict[Side, Any]) -> None:
        """One pass through the current layer; its output is kept."""
        output = self._begin(forward, outputs)
        outputs[stage.side] = self._keep(output, outputs.get(stage.side))

    def _begin(self, forward: Pass, outputs: Mapping[Side, Any]) -> Any:
        """Run until the pass is broken off; returns what it was broken off with."""
        self._outputs = dict(outputs)
        self._make_room()
        try:
            forward()
        except _Left as left:
            return left.output
        finally:
            self._outputs = {}
        raise RuntimeError(f"{self._stages[self._current].name} was not entered")

    def _keep(self, tree: Any, before: Any) -> Any:
        """Put the tensors of a layer's output away, in the place of those of the layer before where they fit."""
        places = iter(leaves(before, Held))
        kept = map_tree(tree, lambda tensor: self._states.put(tensor, next(places, None)), Tensor)
        for left in places:
            self._states.drop(left)
        return kept

    def _fetch(self, tree: Any) -> Any:
        return map_tree(tree, lambda held: self._states.get(held).to(self._device), Held)

    @contextmanager
    def _intercepted(self) -> Iterator[None]:
        """Have every layer ask `_enter` first."""
        with ExitStack() as stack:
            for index, stage in enumerate(self._stages):
                stack.enter_context(replaced(stage.module, partial(self._enter, index)))
            yield

    def _enter(self, index: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if index < self._current:
            return self._fetch(self._outputs[self._stages[index].side])
        if index == self._current:
            raise _Left(forward(*args, **kwargs))
        raise RuntimeError(f"{self._stages[index].name} was entered too early")

    def _through_sparse(
        self,
        stage: Stage,
        ffn: SparseFFN,
        passes: Sequence[Pass],
        kept: list[dict[Side, Any]],
        after: Callable[[Stage, int], None],
        following: int | None,
    ) -> None:
        """All passes through the current layer and those of its experts that any token was routed to."""
        routed: list[_Routed] = []
        wanted: dict[int, None] = {}
        for number, forward in enumerate(passes):
            routed.append(self._route(stage, ffn, forward, kept[number], len(passes) - number))
            after(stage, number)
            starts = routed[-1].starts
            for expert in range(ffn.num_experts):
                if starts[expert] < starts[expert + 1] and expert not in wanted:
                    wanted[expert] = None
                    self._reader.want(stage.expert(expert))
        self._want(following)
        for expert in wanted:
            loaded = self._reader.take()
            self._run_expert(ffn, expert, loaded, routed)
            self._reader.give_back(loaded)
        for number, forward in enumerate(passes):
            self._mix(stage, ffn, forward, routed[number], kept[number])

    def _route(
        self, stage: Stage, ffn: SparseFFN, forward: Pass, outputs: dict[Side, Any], to_come: int
    ) -> _Routed:
        """One pass up to the experts; `to_come` passes, this one among them, still need room."""
        attention: dict[int, Any] = {}

        def leave(rows: Tensor, counts: Tensor) -> Tensor:
            raise _Left((rows, counts.tolist()))

        def remember(index: int, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            output = real(*args, **kwargs)
            # (output, weights): no layer reads the weights, and most attention functions return none.
            kept = (output[0], None) if isinstance(output, tuple) and len(output) == 2 else output
            nbytes = sum(
                leaf.numel() * (ffn.top_k * 4 + len(stage.attentions) * leaf.itemsize)
                for leaf in leaves(kept, Tensor)
            )
            if self._states.free_memory > to_come * nbytes:
                attention[index] = self._keep(kept, None)
            return output

        with ExitStack() as stack:
            stack.enter_context(runner(ffn, leave))
            for index, module in enumerate(stage.attentions):
                stack.enter_context(replaced(module, partial(remember, index)))
            rows, counts = self._begin(forward, outputs)
        starts = [0]
        for count in counts:
            starts.append(starts[-1] + count)
        return _Routed(self._states.put(rows.float()), starts, ffn.shares_out(counts), attention)

    def _run_expert(self, ffn: SparseFFN, expert: int, loaded: Loaded, routed: Sequence[_Routed]) -> None:
        """One expert on its rows of every pass."""
        first, first_bias, second, second_bias = loaded.tensors

        def run(one: _Routed) -> None:
            start, end = one.starts[expert], one.starts[expert + 1]
            rows = self._states.rows(one.rows, start, end).to(self._device, first.dtype)
            outputs = ffn.run_expert(rows, (first, first_bias, second, second_bias))
            self._states.write(one.rows, start, outputs)

        busy = [one for one in routed if one.starts[expert] < one.starts[expert + 1]]
        on_cpu = self._device.type == "cpu"
        # The kernels of a whole layer, to the last bit: where it would give each expert to one thread, so is it here.
        apart = [one for one in busy if one.shared_out and on_cpu]
        if apart:
            in_threads(run, sorted(apart, key=lambda one: one.starts[expert] - one.starts[expert + 1]))
        for one in busy:
            if not (one.shared_out and on_cpu):
                run(one)

    def _mix(
        self, stage: Stage, ffn: SparseFFN, forward: Pass, routed: _Routed, outputs: dict[Side, Any]
    ) -> None:
        """One pass through the whole current layer, its experts' outputs at hand."""

        def answer(index: int, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if index in routed.attention:
                return self._fetch(routed.attention[index])
            return real(*args, **kwargs)

        with ExitStack() as stack:
            stack.enter_context(
                runner(
                    ffn, lambda rows, _counts: self._states.rows(routed.rows, 0, len(rows)).to(self._device)
                )
            )
            stack.enter_context(unobserved(ffn))
            for index, module in enumerate(stage.attentions):
                stack.enter_context(replaced(module, partial(answer, index)))
            self._through(stage, forward, outputs)
        self._states.drop(routed.rows)
        for tree in routed.attention.values():
            map_tree(tree, self._states.drop, Held)
