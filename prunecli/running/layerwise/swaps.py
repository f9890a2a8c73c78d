"""Parts of a model that are other ones for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from prunecli.modules.sparse_ffn import SparseFFN
from prunecli.running.layerwise.parts import Stage
from prunecli.running.layerwise.reading import Loaded


@contextmanager
def bound(stage: Stage, loaded: Loaded) -> Iterator[None]:
    """Inside, the layer's parameters are the tensors that were read."""
    before = [target.module._parameters[target.attribute] for target in stage.targets]
    for target, tensor in zip(stage.targets, loaded.tensors, strict=True):
        target.module._parameters[target.attribute] = nn.Parameter(tensor, requires_grad=False)
    try:
        yield
    finally:
        for target, parameter in zip(stage.targets, before, strict=True):
            target.module._parameters[target.attribute] = parameter


@contextmanager
def runner(ffn: SparseFFN, function: Callable[[Tensor, Tensor], Tensor]) -> Iterator[None]:
    """Inside, `function` computes what the experts would."""
    before, ffn.runner = ffn.runner, function
    try:
        yield
    finally:
        ffn.runner = before


@contextmanager
def unobserved(ffn: SparseFFN) -> Iterator[None]:
    """Inside, nobody hears of the routing."""
    before, ffn.observer = ffn.observer, None
    try:
        yield
    finally:
        ffn.observer = before
