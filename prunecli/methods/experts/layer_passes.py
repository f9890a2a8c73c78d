"""The encoder's and the decoder's passes of a group of batches, layer by layer, and what is kept of them on the way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from prunecli.architectures.records import Side
from prunecli.methods.experts.batches import Batch, Pair
from prunecli.methods.experts.layer_snapshots import Snapshots
from prunecli.methods.experts.score import Recorder, State, force
from prunecli.processes import ALONE, ProcessGroup
from prunecli.results.gates import ANY, SUMS, GateSums
from prunecli.running.layerwise.parts import Skeleton, Stage
from prunecli.running.layerwise.running import Begun, LayerwiseForward, Pass
from prunecli.running.layerwise.states import StateStore, Stored
from prunecli.text.batching import pad


@dataclass
class Passes:
    """How the batches of a group go through a model.

    Attributes:
        layers: runs them.
        skeleton: the model.
        states: of the batches.
        recorder: observes its sparse layers.
        pad_id: of the tokenizer.
        advance: is told of each batch that is through a layer.
        process_group: of several processes, each with batches of its own: they add up after every sparse layer.
    """

    layers: LayerwiseForward
    skeleton: Skeleton
    states: StateStore
    recorder: Recorder
    pad_id: int
    advance: Callable[[float], None]
    process_group: ProcessGroup = ALONE

    def run(
        self, batches: Sequence[Batch], state: State, group: int, snapshots: Snapshots | None
    ) -> dict[Pair, GateSums]:
        """Encoder, then decoder; returns `state`'s sums with those of the group.

        Args:
            batches: those of the group that this process has.
            state: before the group.
            group: batches of all processes.
            snapshots: of the group.
        """
        sums = dict(state.sums)
        encoded: list[Stored] = []
        begun: Begun | None = None
        side: Side = "encoder"
        if snapshots is not None and (header := snapshots.header(state.batches)) is not None:
            tree = snapshots.read(self.states)
            encoded, side = tree["encoded"], header["side"]
            sums = {
                (source, target): GateSums(*(part.numpy() for part in parts))
                for (source, target), parts in zip(header["pairs"], tree["sums"], strict=True)
            }
            begun = Begun(int(header["stage"]), tree["outputs"])
            self.advance(steps(self.skeleton.stages[: begun.stage + 1], batches))

        def layer_done(side: Side, found: list[dict[Pair, GateSums]], begun: Begun) -> None:
            self._add(sums, found, begun.stage)
            if snapshots is None or not snapshots.due():
                return
            header = {
                "batches": state.batches,
                "group": group,
                "side": side,
                "stage": begun.stage,
                "pairs": list(sums),
            }
            arrays = [[torch.from_numpy(getattr(entry, name)) for name in SUMS] for entry in sums.values()]
            tree = {"outputs": begun.outputs, "encoded": encoded, "sums": arrays}
            snapshots.write(header, tree, self.states)

        if side == "encoder":
            found: list[dict[Pair, GateSums]] = [{} for _ in batches]
            self._run(
                [partial(self._encoder, batch) for batch in batches],
                "encoder",
                [(number, (batch.source, ANY)) for number, batch in enumerate(batches)],
                found,
                begun,
                partial(layer_done, "encoder", found),
                finish=lambda _number, output: encoded.append(self.states.put(output)),
            )
            begun = None
        found = [{} for _ in batches]
        passes = [(number, target) for number, batch in enumerate(batches) for target in batch.targets]
        self._run(
            [partial(self._decoder, batches[number], target, encoded[number]) for number, target in passes],
            "decoder",
            [(number, (batches[number].source, target)) for number, target in passes],
            found,
            begun,
            partial(layer_done, "decoder", found),
        )
        return sums

    def _run(
        self,
        passes: Sequence[Pass],
        side: Side,
        keys: Sequence[tuple[int, Pair]],
        found: list[dict[Pair, GateSums]],
        begun: Begun | None,
        layer_done: Callable[[Begun], None],
        finish: Callable[[int, Any], None] = lambda _number, _output: None,
    ) -> None:
        """The passes through one side; what a sparse layer routed of one is put in `found` under its batch and key."""

        def after(stage: Stage, number: int) -> None:
            if stage.sparse is not None:
                batch, key = keys[number]
                found[batch][key] = self.recorder.take().layer(self.recorder.position(stage.sparse))
            self.advance(1)

        if passes:
            self.layers.run(
                passes, sides=(side,), finish=finish, after=after, begun=begun, layer_done=layer_done
            )
            return
        for index, stage in enumerate(self.skeleton.stages):  # nothing for this process: it keeps step
            if stage.side == side and index > (-1 if begun is None else begun.stage):
                layer_done(Begun(index, []))

    def _masked(self, batch: Batch) -> tuple[Tensor, Tensor]:
        ids, mask = pad(batch.sources, self.pad_id)
        return ids.to(self.skeleton.device), mask.to(self.skeleton.device)

    def _encoder(self, batch: Batch) -> Any:
        ids, mask = self._masked(batch)
        return self.skeleton.model.get_encoder()(input_ids=ids, attention_mask=mask).last_hidden_state

    def _decoder(self, batch: Batch, target: str, encoded: Stored) -> None:
        output = self.states.get(encoded).to(self.skeleton.device)
        force(self.skeleton.model, batch.targets[target], self.pad_id, output, self._masked(batch)[1])

    def _add(self, sums: dict[Pair, GateSums], found: list[dict[Pair, GateSums]], stage: int) -> None:
        """Add what the layer routed of the batches of all processes, in the order of the batches."""
        layer = self.skeleton.stages[stage].sparse
        if layer is None:
            return
        position = self.recorder.position(layer)
        for batch in self.process_group.gather_shares(found):
            for key, one in batch.items():
                before = sums[key] if key in sums else self.recorder.nothing()
                sums[key] = before.plus_layer(position, one)


def steps(stages: Sequence[Stage], batches: Sequence[Batch]) -> int:
    """How often a pass of these batches enters one of these layers."""
    decoded = sum(len(batch.targets) for batch in batches)
    return sum(len(batches) if stage.side == "encoder" else decoded for stage in stages)
