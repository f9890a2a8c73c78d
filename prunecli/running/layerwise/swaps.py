"""Parts of a model that are other ones for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from prunecli.modules.replay import replaced
from prunecli.modules.trees import leaves, map_tree
from prunecli.running.layerwise.parts import Stage
from prunecli.running.layerwise.reading import Loaded
from prunecli.running.layerwise.states import StateStore, Stored


@contextmanager
def bound(stage: Stage, loaded: Loaded) -> Iterator[None]:
    """Inside, the layer's parameters and buffers are the tensors that were read."""
    places = [target.place for target in stage.targets]
    before = [place[target.attribute] for place, target in zip(places, stage.targets, strict=True)]
    for place, target, tensor in zip(places, stage.targets, loaded.tensors, strict=True):
        is_buffer = place is target.module._buffers
        place[target.attribute] = tensor if is_buffer else nn.Parameter(tensor, requires_grad=False)
    try:
        yield
    finally:
        for place, target, held in zip(places, stage.targets, before, strict=True):
            place[target.attribute] = held


@contextmanager
def swapped(module: nn.Module, attribute: str, value: Any) -> Iterator[None]:
    """Inside, the attribute has this value.

    A module's `runner` computes what its experts would, its `observer` hears of the routing.
    """
    before = getattr(module, attribute, None)
    setattr(module, attribute, value)
    try:
        yield
    finally:
        setattr(module, attribute, before)


@contextmanager
def remembering(
    stage: Stage, states: StateStore, kept: dict[int, Any], beside: int, to_come: int
) -> Iterator[None]:
    """Inside, what the layer's attentions return is kept where there is room.

    Args:
        kept: by number of the attention, trees of `Stored`.
        beside: bytes that a pass keeps besides, for each value of what an attention returns.
        to_come: passes, this one among them, that still need room.
    """

    def remember(index: int, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        output = real(*args, **kwargs)
        # (output, weights): no layer reads the weights, and most attention functions return none.
        found = (output[0], None) if isinstance(output, tuple) and len(output) == 2 else output
        nbytes = sum(
            leaf.numel() * (beside + len(stage.attentions) * leaf.itemsize) for leaf in leaves(found, Tensor)
        )
        if states.free_memory > to_come * nbytes:
            kept[index] = map_tree(found, states.put, Tensor)
        return output

    with ExitStack() as stack:
        for index, module in enumerate(stage.attentions):
            stack.enter_context(replaced(module, partial(remember, index)))
        yield


@contextmanager
def recalling(
    stage: Stage, states: StateStore, kept: Mapping[int, Any], device: torch.device
) -> Iterator[None]:
    """Inside, the layer's attentions answer with what `remembering` kept of them."""

    def answer(index: int, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if index in kept:
            return map_tree(kept[index], lambda held: states.get(held).to(device), Stored)
        return real(*args, **kwargs)

    with ExitStack() as stack:
        for index, module in enumerate(stage.attentions):
            stack.enter_context(replaced(module, partial(answer, index)))
        yield
