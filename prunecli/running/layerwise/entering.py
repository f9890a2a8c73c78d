"""A model's own forward pass, begun anew for each layer: the layers before it answer with what is kept of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from prunecli.architectures.records import Side
from prunecli.modules.replay import replaced
from prunecli.running.layerwise.parts import Stage
from prunecli.running.runner import Pass


class StopForward(BaseException):
    """Breaks a forward pass off; not an Exception, so that nothing in between takes it for one."""

    def __init__(self, output: Any = None) -> None:
        super().__init__()
        self.output = output


class LayerReplay:
    """Runs passes up to the current layer; those before it answer with what is kept of them.

    Args:
        stages: the layers, in order.
        fetch: from what is kept of a layer's output to that output.
        make_room: called before a pass is begun, which takes memory for its activations.

    Attributes:
        current: number of the layer after which passes are broken off; that of no layer: passes go to their end.
    """

    def __init__(
        self, stages: Sequence[Stage], fetch: Callable[[Any], Any], make_room: Callable[[], None]
    ) -> None:
        self.current = -1
        self._stages, self._fetch, self._make_room = stages, fetch, make_room
        self._kept: Mapping[Side, Any] = {}
        self._given: dict[Side, Any] = {}

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Inside, every layer asks here first."""
        with ExitStack() as stack:
            for index, stage in enumerate(self._stages):
                stack.enter_context(replaced(stage.module, partial(self._enter, index)))
            yield

    def begin(self, forward: Pass, kept: Mapping[Side, Any], given: dict[Side, Any] | None = None) -> Any:
        """Run until the pass is broken off; returns what it was broken off with.

        Args:
            kept: by side, what is kept of the output of the last layer before the current one.
            given: is filled with these outputs, as the pass got them.
        """
        try:
            self._run(forward, kept, given)
        except StopForward as left:
            return left.output
        raise RuntimeError(f"{self._stages[self.current].name} was not entered")

    def end(self, forward: Pass, kept: Mapping[Side, Any], given: dict[Side, Any] | None = None) -> Any:
        """Run to the end, all layers answering; returns what the pass returns."""
        self.current = len(self._stages)
        return self._run(forward, kept, given)

    def _run(self, forward: Pass, kept: Mapping[Side, Any], given: dict[Side, Any] | None) -> Any:
        self._kept, self._given = dict(kept), {} if given is None else given
        self._make_room()
        try:
            return forward()
        finally:
            self._kept, self._given = {}, {}

    def _enter(self, index: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if index < self.current:
            side = self._stages[index].side
            if side not in self._given:
                self._given[side] = self._fetch(self._kept[side])
            return self._given[side]
        if index == self.current:
            raise StopForward(forward(*args, **kwargs))
        raise RuntimeError(f"{self._stages[index].name} was entered too early")
