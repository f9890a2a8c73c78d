"""Gradients layer by layer against those of the whole model in memory."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from prunecli.model.checkpoint import Checkpoint, open_model
from prunecli.modules.hooks import output_projections
from prunecli.running.layerwise.forward import PassRun
from prunecli.running.layerwise.states import Stored, leaves
from prunecli.running.runner import ignored
from tests.families import MODEL_TYPES
from tests.families.records import own_layouts
from tests.opening import load
from tests.running.layerwise.running import (
    BATCHES,
    StopError,
    passes,
    skeleton_of,
    started,
)
from tests.running.layerwise.test_forward import Run as Forward
from tests.running.layerwise.test_forward import assert_clean
from tests.tiny import tiny_nllb_moe

Found = dict[str, list[Tensor]]
"""Attention's name -> gradient of the input of its output projection, batch by batch."""


class Watch:
    """Notes the gradients of what the output projections are given, in the order of the batches."""

    def __init__(self, model: Any, checkpoint: Checkpoint) -> None:
        self.found = {}
        self.handles = [
            projection.register_forward_pre_hook(self._hook(name))
            for name, projection in output_projections(model, checkpoint.layout.attentions).items()
        ]

    def _hook(self, name: str) -> Any:
        def hook(_: Any, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            context, *rest = given
            context = context if context.requires_grad else context.detach().requires_grad_()
            context.register_hook(
                lambda gradient: self.found.setdefault(name, []).append(gradient.detach().clone())
            )
            return (context, *rest)

        return hook


def scalar(result: Any) -> Tensor:
    """Something of which every part of the result has another share."""
    weights = torch.linspace(-1, 1, result.numel(), dtype=torch.float32).view_as(result)
    return (result.float() * weights).sum()


def in_memory(path: Path) -> Found:
    model = load(path)
    watch = Watch(model.requires_grad_(False), open_model(path))
    for run in passes(model):
        scalar(run()).backward()
    return watch.found


class Run(Forward):
    """A checkpoint's skeleton, what was read of it, and the gradients."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        self.watch = Watch(self.skeleton.model, checkpoint)

    def run(self, advance: Any = ignored, memory: int = 1 << 22) -> Found:
        with started(self.skeleton, self.checkpoint, memory, advance) as (layers, _):
            layers.backward(passes(self.skeleton.model), lambda _number, result: scalar(result))
        return self.watch.found


def assert_same(found: Found, wanted: Found, rtol: float = 2e-5) -> None:
    assert found.keys() == wanted.keys()
    for name, gradients in wanted.items():
        assert len(found[name]) == len(gradients) == len(BATCHES)
        for one, other in zip(found[name], gradients, strict=True):
            assert other.abs().max() > 0
            torch.testing.assert_close(one, other, rtol=rtol, atol=rtol * float(other.abs().max()))


@pytest.mark.parametrize(
    ("model_type", "memory"),
    [
        *((model_type, 9984) for model_type in own_layouts(MODEL_TYPES)),  # in memory and in a file
        *(("gpt2", memory) for memory in (1 << 22, 0)),
    ],
)
def test_dense_families(model_type, memory, models):
    path = models[model_type]
    # With a decoder behind it, an encoder's gradients are summed in another order.
    is_exact = model_type not in ("bart", "t5")
    assert_same(Run(open_model(path)).run(memory=memory), in_memory(path), 0.0 if is_exact else 2e-5)


def test_every_weight_is_read_once_each_way_and_the_last_layer_once_in_all(models):
    checkpoint = open_model(models["m2m_100"])
    run = Run(checkpoint)
    run.run()
    for number, stage in enumerate(run.skeleton.stages):
        times = 1 if number == len(run.skeleton.stages) - 1 else 2
        for place in stage.targets:
            assert run.reads[place.name] == times * checkpoint.info(place.name).nbytes
    assert not {place.name for place in run.skeleton.resident} & set(run.reads)


@pytest.mark.parametrize("model_type", ["m2m_100", "nllb-moe"])
def test_nothing_is_left_in_the_model(model_type, models):
    run = Run(open_model(models[model_type]))
    run.run()
    assert_clean(run.skeleton)
    first = {name: list(found) for name, found in run.watch.found.items()}
    run.watch.found.clear()
    assert_same(run.run(), first, 0.0)  # and it can be run again


@pytest.mark.parametrize(
    ("kind", "step"), [*((Forward, step) for step in (0, 7, 14)), *((Run, step) for step in (0, 27, 36))]
)
def test_a_failure_anywhere_leaves_nothing_either(kind, step):
    run = kind(open_model(tiny_nllb_moe("model")))
    with pytest.raises(StopError):
        run.run(advance=Mock(side_effect=[None] * step + [StopError]))
    assert_clean(run.skeleton)


def test_what_a_layer_hands_on_is_stored_once(models):
    """T5's layers hand on the position bias."""
    checkpoint = open_model(models["t5"])
    skeleton = skeleton_of(checkpoint)
    one = PassRun(passes(skeleton.model)[0])
    with started(skeleton, checkpoint) as (layers, states):
        with layers.intercepting():
            for index in range(2):
                layers.want(index)
                with layers.loaded(index):
                    assert list(layers.through(-1, [one])) == [one]
        first, second = (leaves(one.outputs[index], Stored) for index in range(2))
        assert first[1] == second[1]
        assert first[0] != second[0]
        layers.forget(one, 0)
        assert states.get(second[1]).abs().sum() > 0
        layers.forget(one, 1)
