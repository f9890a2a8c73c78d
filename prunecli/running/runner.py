"""One way to run a model: passes of batches go through it, and observers see what its modules do meanwhile.

A method brings passes, an observer, and what adds up what the observer saw. How batches go through the model is the
runner's: `InMemory` has one pass after another run to its end; `layerwise.runner.Layerwise` reads the weights from
disk, and has all passes of a group of batches go through a layer before the next one is read. Numbers are the same to
the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import islice
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from prunecli.architectures.records import Side
from prunecli.processes import ALONE, ProcessGroup
from prunecli.progress import Advance as Advance

B = TypeVar("B")

Pass = Callable[[], Any]
"""One batch's forward pass of a runner's model, or of one of its stacks. Layer by layer it is begun once for each layer
and more: it must do the same each time, and use no cache of keys and values."""

REHEARSING = ContextVar("REHEARSING", default=False)
"""Whether another pass through the layers computes the same again: observers leave these out."""

BATCHES_APART = 4
"""Batches of each of several processes from one exchange of what they saw to the next."""


@contextmanager
def rehearsing() -> Iterator[None]:
    """Within the block, layers rehearse: see `REHEARSING`."""
    token = REHEARSING.set(True)
    try:
        yield
    finally:
        REHEARSING.reset(token)


def ignored(*_: Any) -> None:
    """No-op callback."""


@dataclass(frozen=True)
class BatchCost:
    """Bytes that a batch takes, or a group of them.

    Attributes:
        activations: while it is in a layer.
        states: kept between two layers, for each of the phases that follow each other (as encoder and decoder do).
    """

    activations: int = 0
    states: tuple[int, ...] = ()


@dataclass(frozen=True)
class Group(Generic[B]):
    """Batches that go through a model together.

    Attributes:
        start: how many batches come before them.
        batches: of all processes, every n-th for each.
        cost: of the process that needs most: its largest batch's activations, its states in the phase with most.
    """

    start: int
    batches: Sequence[B]
    cost: BatchCost = BatchCost()


class Observer(Protocol):
    """Sees what modules do while passes run."""

    def watching(self, model: nn.Module) -> AbstractContextManager[None]:
        """Inside, hooks are on the modules of `model`."""

    def take(self) -> Any:
        """Return the observations since the last call."""


class InMemory:
    """Runs a model that is held whole; also the `Run` of each of its groups.

    Attributes:
        model: the model that passes call, in evaluation mode.
        device: the device that passes compute on.
        layerwise: whether the layers' weights are on disk.
        process_group: the processes that share the batches; each has a model.
        report: costs of a run layer by layer; None: the model is held whole.
        restored: what `keeping` of an interrupted run of this group returned; None: the group begins.
    """

    layerwise = False
    report = restored = None

    def __init__(self, model: Any, process_group: ProcessGroup = ALONE) -> None:
        self.model, self.process_group = model, process_group
        self.device: torch.device = model.device

    def steps(self, _passes: Mapping[Side, int]) -> int:
        """Number of calls of `advance` for a number of passes through each stack."""
        return 0

    def groups(self, batches: Iterable[B], _cost: Any = None, start: int = 0) -> Iterator[Group[B]]:
        """Batches that run together, in their order: one at a time; with several processes a few for each.

        Args:
            batches: batches of all processes.
            start: number of batches before them.
        """
        size = self.process_group.world_size
        for together in chunks(batches, 1 if size == 1 else BATCHES_APART * size):
            yield Group(start, together)
            start += len(together)

    @contextmanager
    def running(self, _group: Group[Any], _advance: Advance = ignored) -> Iterator[InMemory]:
        """Within the block, the group runs."""
        yield self

    def forward(
        self,
        passes: Sequence[Pass],
        *,
        observer: Observer | None = None,
        reduce: Callable[[list[Any]], None] = ignored,
        finish: Callable[[int, Any], None] = ignored,
        **_layerwise: Any,
    ) -> None:
        """Run passes without gradients.

        Args:
            passes: passes of this process's batches.
            observer: watches the model.
            reduce: is called with what the observer saw of each pass, in the order of the passes: once, or after each
                layer. All processes call it equally often.
            finish: is called with the number of each pass, in order, and what the pass returned.
        """
        seen = []
        with torch.inference_mode():
            for number, forward in enumerate(passes):
                output = forward()
                if observer is not None:
                    seen.append(observer.take())
                finish(number, output)
        reduce(seen)

    def backward(self, passes: Sequence[Pass], start: Callable[[int, Any], Tensor]) -> None:
        """Run passes and differentiate, for what hooks ask for.

        Args:
            start: from a pass's number and what it returned to the scalar that is differentiated.
        """
        with torch.enable_grad():
            for number, forward in enumerate(passes):
                scalar = start(number, forward())
                if scalar.requires_grad:  # else nothing asks for gradients
                    scalar.backward()  # type: ignore[no-untyped-call]

    def keep(self, tensor: Tensor) -> Tensor:
        """Store a tensor while the group runs; `fetch` returns it on the model's device."""
        return tensor

    fetch = keep


def chunks(items: Iterable[B], size: int) -> Iterator[list[B]]:
    """So many items at a time; the last time those that remain."""
    iterator = iter(items)
    while chunk := list(islice(iterator, size)):
        yield chunk
