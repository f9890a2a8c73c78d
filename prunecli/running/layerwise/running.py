"""Forward passes of many batches, layer by layer.

Nothing of a model's forward pass is restated. For each layer, each batch's own forward pass is begun anew; the layers
before it answer with what the last of them returned before, so that little but the embeddings is computed twice, and
after the layer the pass is broken off. In a sparse layer a pass is broken off once more, at the experts: see `sparse`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from prunecli.architectures.records import Side
from prunecli.modules.sparse_ffn import SparseFFN
from prunecli.running.layerwise.entering import LayerReplay, Pass
from prunecli.running.layerwise.parts import Skeleton, Stage
from prunecli.running.layerwise.reading import Reader
from prunecli.running.layerwise.sparse import SparsePasses
from prunecli.running.layerwise.states import StateStore, Stored
from prunecli.running.layerwise.swaps import bound
from prunecli.running.layerwise.trees import leaves, map_tree

__all__ = ["Begun", "LayerwiseForward", "Pass"]


@dataclass(frozen=True)
class Begun:
    """How far a run has come.

    Attributes:
        stage: number of the last layer that all passes are through; -1: none.
        outputs: of each pass, by side, what the last layer returned, as a tree of `Stored`.
    """

    stage: int
    outputs: list[dict[Side, Any]]


class LayerwiseForward:
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
        states: StateStore,
        make_room: Callable[[], None] = lambda: None,
    ) -> None:
        self._reader, self._states = reader, states
        self._device, self._stages = skeleton.device, skeleton.stages
        self._replay = LayerReplay(skeleton.stages, self._fetch, make_room)
        self._sparse = SparsePasses(reader, states, self._replay, skeleton.device)

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
        with torch.inference_mode(), self._replay.guarded():
            if chosen:
                self._reader.want(self._stages[chosen[0]].block)
            for index, following in zip(chosen, [*chosen, None][1:], strict=True):
                self._replay.current = index
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
            for number, forward in enumerate(passes):
                finish(number, self._replay.end(forward, kept[number]))
                for tree in kept[number].values():
                    map_tree(tree, self._states.drop, Stored)
                kept[number] = {}

    def _want(self, index: int | None) -> None:
        if index is not None:
            self._reader.want(self._stages[index].block)

    def _through(self, stage: Stage, forward: Pass, outputs: dict[Side, Any]) -> None:
        """One pass through the current layer; its output is kept."""
        output = self._replay.begin(forward, outputs)
        outputs[stage.side] = self._keep(output, outputs.get(stage.side))

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
        routed, wanted = self._sparse.route(stage, ffn, passes, kept, after)
        self._want(following)
        self._sparse.run(ffn, wanted, routed)
        for number, forward in enumerate(passes):
            with self._sparse.answering(stage, ffn, routed[number]):
                self._through(stage, forward, kept[number])
            self._sparse.drop(routed[number])

    def _keep(self, tree: Any, before: Any) -> Any:
        """Put the tensors of a layer's output away, in the place of those of the layer before where they fit."""
        places = iter(leaves(before, Stored))
        kept = map_tree(tree, lambda tensor: self._states.put(tensor, next(places, None)), Tensor)
        for left in places:
            self._states.drop(left)
        return kept

    def _fetch(self, tree: Any) -> Any:
        return map_tree(tree, lambda held: self._states.get(held).to(self._device), Stored)
