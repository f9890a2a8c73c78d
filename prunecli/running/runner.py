"""One way to run a model: passes of batches go through it, and observers see what its modules do meanwhile.

A method brings passes, an observer, and what adds up what the observer saw. How batches go through the model is the
runner's: `InMemory` has one pass after another run to its end; `layerwise.runner.Layerwise` reads the weights from
disk, and has all passes of a group of batches go through a layer before the next one is read. Numbers are the same to
the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from prunecli.architectures.records import Side
from prunecli.processes import ALONE, ProcessGroup

B = TypeVar("B")

Pass = Callable[[], Any]
"""One batch's forward pass of a runner's model, or of one of its stacks. Layer by layer it is begun once for each layer
and more: it must do the same each time, and use no cache of keys and values."""

Advance = Callable[[float], None]

BATCHES_APART = 4
"""Batches of each of several processes from one exchange of what they saw to the next."""


def ignored(*_: Any) -> None:
    """No-op callback."""


@dataclass(frozen=True)
class BatchCost:
    """Bytes that a batch takes, or a group of them.

    Attributes:
        activations: while it is in a layer.
        states: kept between two layers, for each of the phases that follow each other (as encoder and decoder do).
    """

    activations: int
    states: tuple[int, ...]


NOTHING = BatchCost(0, ())


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
    cost: BatchCost = NOTHING


class Observer(Protocol):
    """Sees what modules do while passes run."""

    def watching(self, model: nn.Module) -> AbstractContextManager[None]:
        """Inside, hooks are on the modules of `model`."""

    def take(self) -> Any:
        """What was seen since the last call."""


class Run(Protocol):
    """A group of batches on its way through a model."""

    @property
    def restored(self) -> Any:
        """What `keeping` of an interrupted run of this group gave; None: the group begins."""

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
        """Run passes without gradients.

        Args:
            passes: of this process's batches.
            side: the stack that they go through; None: all.
            observer: watches the runner's model.
            reduce: is given what was seen of each pass, in their order: once, or once after each layer. All processes
                call it equally often.
            finish: is given the number of each pass, in order, and what it returned.
            keeping: everything that an interrupted run needs beside the passes' states: tensors in `keep` or on the
                CPU, in tuples, lists and dictionaries with what JSON knows.

        Raises:
            CheckpointError: weights cannot be read.
            OutputError: no room for the batches' states.
        """

    def backward(self, passes: Sequence[Pass], start: Callable[[int, Any], Tensor]) -> None:
        """Run passes and differentiate; parameters get no gradients, what hooks ask for does.

        Args:
            start: from a pass's number and what it returned to the scalar that is differentiated.

        Raises:
            CheckpointError: weights cannot be read.
            OutputError: no room for what is kept.
        """

    def keep(self, tensor: Tensor) -> Any:
        """Keep a tensor as long as the group runs."""

    def fetch(self, kept: Any) -> Tensor:
        """What was given to `keep`, on the model's device."""


class Runner(Protocol):
    """Has batches go through a model.

    Attributes:
        model: that passes call; its weights may be there only while it runs.
        device: that passes compute on.
        layerwise: whether its layers' weights are on disk.
        process_group: the processes that share the batches.
    """

    model: Any
    device: torch.device
    layerwise: bool
    process_group: ProcessGroup

    def steps(self, passes: Mapping[Side, int], /) -> int:
        """How often `advance` is called for so many passes through each stack."""

    def groups(
        self, batches: Iterable[B], cost: Callable[[Any, B], BatchCost], /, start: int = 0
    ) -> Iterable[Group[B]]:
        """Batches that go together, in their order: as many as find room.

        Args:
            batches: of all processes.
            cost: from the runner and a batch to what the batch takes layer by layer, where that matters.
            start: how many batches come before them.

        Raises:
            UsageError: too little memory; it names the smallest that works.
            OutputError: no room for what is kept of a single batch.
        """

    def running(self, group: Group[Any], advance: Advance = ignored, /) -> AbstractContextManager[Run]:
        """Inside, the group is run.

        Args:
            advance: is called with 1 for each pass that is through a layer, where layers are gone through one by one.
        """


class InMemory:
    """Runs a model that is held whole: a `Runner`, and the `Run` of each of its groups.

    Args:
        model: in evaluation mode.
        process_group: each of its processes has a model.
    """

    layerwise = False
    restored = None

    def __init__(self, model: Any, process_group: ProcessGroup = ALONE) -> None:
        self.model, self.process_group = model, process_group
        self.device: torch.device = model.device

    def steps(self, _passes: Mapping[Side, int]) -> int:
        """See `Runner`."""
        return 0

    def groups(self, batches: Iterable[B], _cost: Any = None, start: int = 0) -> Iterator[Group[B]]:
        """One batch at a time; with several processes a few for each, as they wait for the slowest."""
        size = self.process_group.world_size
        for together in chunks(batches, 1 if size == 1 else BATCHES_APART * size):
            yield Group(start, together)
            start += len(together)

    @contextmanager
    def running(self, _group: Group[Any], _advance: Advance = ignored) -> Iterator[InMemory]:
        """See `Runner`."""
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
        """See `Run`."""
        seen = []
        with torch.inference_mode():
            for number, forward in enumerate(passes):
                output = forward()
                if observer is not None:
                    seen.append(observer.take())
                finish(number, output)
        reduce(seen)

    def backward(self, passes: Sequence[Pass], start: Callable[[int, Any], Tensor]) -> None:
        """See `Run`."""
        with torch.enable_grad(), frozen(self.model):
            for number, forward in enumerate(passes):
                start(number, forward()).backward()  # type: ignore[no-untyped-call]

    def keep(self, tensor: Tensor) -> Tensor:
        """See `Run`."""
        return tensor

    fetch = keep


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Parameters ask for no gradients within the block: those of activations are all that is needed."""
    asking = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in asking:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in asking:
            parameter.requires_grad_(True)


def chunks(items: Iterable[B], size: int) -> Iterator[list[B]]:
    """So many items at a time; the last time those that remain."""
    iterator = iter(items)
    while chunk := list(islice(iterator, size)):
        yield chunk
