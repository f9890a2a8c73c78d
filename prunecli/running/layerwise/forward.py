"""A group of batches on its way through a model whose layers' weights are read one after another.

Nothing of a model's forward pass is restated. For each layer, each batch's own forward pass is begun anew; the layers
before it answer with what the last of them returned before, so that little but the embeddings is computed twice, and
after the layer the pass is broken off. In a sparse layer a pass is broken off once more, at the experts: see `sparse`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from prunecli.architectures.records import Side
from prunecli.modules.trees import leaves, map_tree
from prunecli.running.layerwise.entering import LayerReplay
from prunecli.running.layerwise.gradients import Gradients
from prunecli.running.layerwise.parts import Skeleton, Stage
from prunecli.running.layerwise.reading import Reader
from prunecli.running.layerwise.snapshot import Snapshots
from prunecli.running.layerwise.sparse import SparsePasses
from prunecli.running.layerwise.states import StateStore, Stored
from prunecli.running.layerwise.stock_sparse import StockPasses
from prunecli.running.layerwise.swaps import bound
from prunecli.running.runner import Advance, Group, Observer, Pass, frozen, ignored


class LayerwiseRun:
    """A `Run` of a model whose layers' weights are read one after another.

    Args:
        skeleton: its resident tensors are there.
        reader: of its checkpoint.
        states: where the batches are kept between two layers.
        make_room: called before a pass is begun, which takes memory for its activations.
        advance: as in `Runner.running`.
        group: what is run, of which `snapshots` may hold a part.
        snapshots: where the states are kept after a layer, to go on from.

    Attributes:
        restored: what `keeping` gave when the snapshot was written from which the run goes on; None: there is none.
    """

    def __init__(
        self,
        skeleton: Skeleton,
        reader: Reader,
        states: StateStore,
        make_room: Callable[[], None] = ignored,
        advance: Advance = ignored,
        group: Group[Any] | None = None,
        snapshots: Snapshots | None = None,
    ) -> None:
        self._skeleton, self._stages, self._device = skeleton, skeleton.stages, skeleton.device
        self._reader, self._states, self._make_room, self._advance = reader, states, make_room, advance
        self._replay = LayerReplay(skeleton.stages, self._fetch, make_room)
        self._sparse = SparsePasses(reader, states, self._replay, skeleton.device)
        self._stock = StockPasses(reader, states, self._replay, skeleton.device)
        self._group, self._snapshots = group, snapshots
        self.restored: Any = None
        self._resumed: tuple[int, list[dict[Side, Any]]] | None = None
        if snapshots and group and (header := snapshots.header(group.start)) is not None:
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
        """See `Run`: each pass enters the layers of the stack once, in order, and no others.

        In a sparse layer, what was seen is taken when a pass is through the router; where the experts alone are
        declared, when they are done.
        """
        indices = [index for index, stage in enumerate(self._stages) if side in (None, stage.side)]
        # The number of the last layer that all passes are through; what that returned of each, by side.
        done, outputs = self._resumed or (-1, [{} for _ in passes])
        if done >= 0:
            self._advance(len(passes) * sum(index <= done for index in indices))
        if done > indices[-1]:  # the interrupted run was at a later stack
            return
        self._resumed = None
        ahead = [index for index in indices if index > done]
        with torch.inference_mode(), self._replay.guarded():
            if passes and ahead:
                self._want(ahead[0])
            for index, following in zip(ahead, [*ahead[1:], None], strict=False):
                seen: list[Any] = []
                if passes:  # a process without any keeps step with the others
                    self._layer(index, following, passes, outputs, observer, seen)
                reduce(seen)
                if self._snapshots and self._group and self._snapshots.due():
                    header = {"batches": self._group.start, "group": len(self._group.batches), "stage": index}
                    self._snapshots.write(header, {"outputs": outputs, "kept": keeping()}, self._states)
            for number, forward in enumerate(passes):
                finish(number, self._replay.end(forward, outputs[number]))
                for tree in outputs[number].values():
                    map_tree(tree, self._states.drop, Stored)
                outputs[number] = {}

    def backward(self, passes: Sequence[Pass], start: Callable[[int, Any], Tensor]) -> None:
        """See `Run`: each pass goes through all layers once, and back."""
        gradients = Gradients(self._skeleton, self._reader, self._states, self._make_room)
        with torch.enable_grad(), frozen(self._skeleton.model):
            gradients.run(passes, start=start, after=lambda _stage, _number: self._advance(1))

    def keep(self, tensor: Tensor) -> Stored:
        """See `Run`."""
        return self._states.put(tensor)

    def fetch(self, kept: Stored) -> Tensor:
        """See `Run`."""
        return self._states.get(kept).to(self._device)

    def _layer(
        self,
        index: int,
        following: int | None,
        passes: Sequence[Pass],
        outputs: list[dict[Side, Any]],
        observer: Observer | None,
        seen: list[Any],
    ) -> None:
        """All passes through one layer; `seen` grows by what the observer saw of each."""

        def after(_stage: Stage, _number: int) -> None:
            if observer is not None:
                seen.append(observer.take())
            self._advance(1)

        self._replay.current = index
        stage = self._stages[index]
        loaded = self._reader.take()
        with bound(stage, loaded):
            if stage.stock is not None:
                given, wanted = self._stock.route(stage, stage.stock, passes, outputs)
                self._want(following)
                self._stock.run(stage.stock, wanted, given)
                for number, (forward, one) in enumerate(zip(passes, given, strict=True)):
                    with self._stock.answering(stage, stage.stock, one):
                        self._through(stage, forward, outputs[number])
                    self._stock.drop(one)
                    after(stage, number)
            elif stage.ffn is None:
                self._want(following)
                for number, forward in enumerate(passes):
                    self._through(stage, forward, outputs[number])
                    after(stage, number)
            else:
                routed, experts = self._sparse.route(stage, stage.ffn, passes, outputs, after)
                self._want(following)
                self._sparse.run(stage.ffn, experts, routed)
                for forward, kept, sent in zip(passes, outputs, routed, strict=True):
                    with self._sparse.answering(stage, stage.ffn, sent):
                        self._through(stage, forward, kept)
                    self._sparse.drop(sent)
        self._reader.give_back(loaded)

    def _want(self, index: int | None) -> None:
        if index is not None:
            self._reader.want(self._stages[index].block)

    def _through(self, stage: Stage, forward: Pass, outputs: dict[Side, Any]) -> None:
        """One pass through the current layer; its output is kept."""
        output = self._replay.begin(forward, outputs)
        outputs[stage.side] = self._keep(output, outputs.get(stage.side))

    def _keep(self, tree: Any, before: Any) -> Any:
        """Put the tensors of a layer's output away, in the place of those of the layer before where they fit."""
        places = iter(leaves(before, Stored))
        kept = map_tree(tree, lambda tensor: self._states.put(tensor, next(places, None)), Tensor)
        for left in places:
            self._states.drop(left)
        return kept

    def _fetch(self, tree: Any) -> Any:
        return map_tree(tree, lambda held: self._states.get(held).to(self._device), Stored)
