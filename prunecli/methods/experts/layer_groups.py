"""Which batches go through the layers together: as many as memory and disk hold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from prunecli.errors import OutputError
from prunecli.methods.experts.batches import Batch, chunks
from prunecli.running.layerwise.budget import (
    Demand,
    Plan,
    Shape,
    activation_bytes,
    plan_memory,
    size_text,
    state_bytes,
)
from prunecli.running.layerwise.session import Held


@dataclass(frozen=True)
class Group(Held):
    """Batches that go through the layers together; what they take is that of the process that needs most.

    Attributes:
        batches: of all processes, every n-th for each.
    """

    batches: list[Batch]


@dataclass(frozen=True)
class Room:
    """What each process may use; the same on all of them, so that all cut the same groups.

    Attributes:
        memory: bytes, of a process on a CPU, of the device else.
        states: bytes of the host for states; None: what the plan leaves of `memory`.
        disk: bytes for states beyond that.
        directory: of these.
        demand: without activations.
        shape: of the model.
        processes: how many they are.
    """

    memory: int
    states: int | None
    disk: int
    directory: Path
    demand: Demand
    shape: Shape
    processes: int = 1

    def groups(self, batches: Iterable[Batch], first: int | None) -> Iterator[Group]:
        """Cut the batches where memory and disk are full; the first group has `first` batches where that is given.

        A group ends where each process has as many batches as every other, or where there are none left.

        Raises:
            UsageError: too little memory.
            OutputError: no room for the states of one batch.
        """
        found: list[Batch] = []
        activations = encoder = decoder = 0
        plan: Plan | None = None
        for together in chunks(batches, self.processes):
            wider = max(activations, self._activations(together))
            more_encoder, more_decoder = self._states(together)
            wanted = self._plan(wider)
            full = max(encoder + more_encoder, decoder + more_decoder) > self.total(wanted)
            if plan is not None and found and (full if first is None else len(found) == first):
                yield Group(plan, max(encoder, decoder), activations, found)
                first = None
                found, encoder, decoder, wider = [], 0, 0, self._activations(together)
                wanted = self._plan(wider)
            found += together
            activations, plan = wider, wanted
            encoder, decoder = encoder + more_encoder, decoder + more_decoder
            if len(found) == len(together) and max(encoder, decoder) > self.total(plan):
                raise OutputError(
                    f"{self.directory}: no room for the states of one batch ({size_text(max(encoder, decoder))})",
                    "Name a --spill-dir with more room, give more --memory, or a smaller --batch-tokens.",
                )
        if found and plan is not None:
            yield Group(plan, max(encoder, decoder), activations, found)

    def total(self, plan: Plan) -> int:
        """Bytes of states that may be held, in memory and on the disk."""
        return self.in_memory(plan) + self.disk

    def in_memory(self, plan: Plan) -> int:
        """Bytes of states that may be held in memory."""
        return plan.states if self.states is None else self.states

    def _activations(self, batches: Sequence[Batch]) -> int:
        """Bytes for the largest of them in one layer."""
        return max(map(self._batch_activations, batches))

    def _plan(self, activations: int) -> Plan:
        return plan_memory(self.memory, replace(self.demand, activations=activations))

    def _batch_activations(self, batch: Batch) -> int:
        sources = max(map(len, batch.sources))
        targets = [max(map(len, labels)) for labels in batch.targets.values()]
        return max(
            activation_bytes(self.shape, len(batch.sources), length, sources)
            for length in (sources, *targets)
        )

    def _states(self, batches: Sequence[Batch]) -> tuple[int, int]:
        """The most that one of them holds: while the encoder runs, and while the decoder does."""
        encoder, decoder = zip(*map(self._batch_states, batches), strict=True)
        return max(encoder), max(decoder)

    def _batch_states(self, batch: Batch) -> tuple[int, int]:
        """Bytes of states; the decoder's with the encoder's output."""

        def held(rows: Sequence[Sequence[int]]) -> int:
            return state_bytes(self.shape, len(rows) * max(map(len, rows)), sum(map(len, rows)))

        output = len(batch.sources) * max(map(len, batch.sources)) * self.shape.d_model * self.shape.itemsize
        return held(batch.sources) + output, output + sum(map(held, batch.targets.values()))
