"""The encoder's and the decoder's passes of a group of batches, layer by layer, and what is kept of them on the way."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from prunecli.architectures.records import Side
from prunecli.data.batching import pad
from prunecli.methods.experts.score import Batch, Pair, Recorder, State, force
from prunecli.methods.experts.statistics import ANY, SUMS, GateSums
from prunecli.modules.layerwise.parts import Skeleton, Stage
from prunecli.modules.layerwise.running import Begun, LayerMajor
from prunecli.modules.layerwise.snapshot import read_header, read_snapshot, write_snapshot
from prunecli.modules.layerwise.states import Held, States

SNAPSHOT_EVERY_S = 60.0


@dataclass
class Snapshots:
    """The states of a group after its last finished layer, in a file.

    Attributes:
        path: of the file.
        key: of the run: a file with another one is not gone on from.
        every_s: seconds between two.
    """

    path: Path
    key: Mapping[str, Any]
    every_s: float = SNAPSHOT_EVERY_S
    written: float = field(default_factory=time.monotonic)

    def group_size(self, batches: int) -> int | None:
        """How many batches the group has that was begun after so many `batches`; None: there is none."""
        found = self.header(batches)
        return None if found is None else int(found["group"])

    def header(self, batches: int) -> dict[str, Any] | None:
        """What is known of the group that was begun after so many `batches`."""
        found = read_header(self.path)
        if found is None or found.get("key") != json.loads(json.dumps(self.key)):
            return None
        return found if found.get("batches") == batches else None

    def read(self, states: States) -> dict[str, Any]:
        """The trees of the file, their tensors now in `states`."""
        found: dict[str, Any] = read_snapshot(self.path, states)
        return found

    def write(self, header: Mapping[str, Any], tree: Mapping[str, Any], states: States) -> None:
        """Replace the file, if the last one is old enough."""
        if time.monotonic() - self.written >= self.every_s:
            write_snapshot(self.path, {"key": dict(self.key), **header}, dict(tree), states)
            self.written = time.monotonic()


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
    """

    layers: LayerMajor
    skeleton: Skeleton
    states: States
    recorder: Recorder
    pad_id: int
    advance: Callable[[float], None]

    def run(
        self, batches: Sequence[Batch], state: State, snapshots: Snapshots | None
    ) -> dict[Pair, GateSums]:
        """Encoder, then decoder; returns `state`'s sums with those of `batches`."""
        sums = dict(state.sums)
        encoded: list[Held] = []
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

        def keep(side: Side, begun: Begun) -> None:
            if snapshots is not None:
                header = {
                    "batches": state.batches,
                    "group": len(batches),
                    "side": side,
                    "stage": begun.stage,
                    "pairs": list(sums),
                }
                arrays = [
                    [torch.from_numpy(getattr(entry, name)) for name in SUMS] for entry in sums.values()
                ]
                tree = {"outputs": begun.outputs, "encoded": encoded, "sums": arrays}
                snapshots.write(header, tree, self.states)

        if side == "encoder":
            self.layers.run(
                [partial(self._encoder, batch) for batch in batches],
                sides=("encoder",),
                finish=lambda _number, output: encoded.append(self.states.put(output)),
                after=self._adding(sums, [(batch.source, ANY) for batch in batches]),
                begun=begun,
                layer_done=partial(keep, "encoder"),
            )
            begun = None
        passes = [(number, target) for number, batch in enumerate(batches) for target in batch.targets]
        self.layers.run(
            [partial(self._decoder, batches[number], target, encoded[number]) for number, target in passes],
            sides=("decoder",),
            after=self._adding(sums, [(batches[number].source, target) for number, target in passes]),
            begun=begun,
            layer_done=partial(keep, "decoder"),
        )
        return sums

    def _masked(self, batch: Batch) -> tuple[Tensor, Tensor]:
        ids, mask = pad(batch.sources, self.pad_id)
        return ids.to(self.skeleton.device), mask.to(self.skeleton.device)

    def _encoder(self, batch: Batch) -> Any:
        ids, mask = self._masked(batch)
        return self.skeleton.model.get_encoder()(input_ids=ids, attention_mask=mask).last_hidden_state

    def _decoder(self, batch: Batch, target: str, encoded: Held) -> None:
        output = self.states.get(encoded).to(self.skeleton.device)
        force(self.skeleton.model, batch.targets[target], self.pad_id, output, self._masked(batch)[1])

    def _adding(self, sums: dict[Pair, GateSums], keys: Sequence[Pair]) -> Callable[[Stage, int], None]:
        """Adds what a sparse layer routed of a pass to the sums under its key."""

        def add(stage: Stage, number: int) -> None:
            if stage.ffn is not None:
                key, found = keys[number], self.recorder.take()
                sums[key] = sums[key] + found if key in sums else found
            self.advance(1)

        return add


def steps(stages: Sequence[Stage], batches: Sequence[Batch]) -> int:
    """How often a pass of these batches enters one of these layers."""
    decoded = sum(len(batch.targets) for batch in batches)
    return sum(len(batches) if stage.side == "encoder" else decoded for stage in stages)
