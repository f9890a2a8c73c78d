"""What layers and experts of stock classes are read from: the parameters of the model that was saved."""

from __future__ import annotations

import pytest
import torch

from prunecli.model.checkpoint import open_model
from prunecli.modules.building import fill_resident, make_model
from prunecli.modules.stock_experts import ExpertWeights
from prunecli.running.layerwise.forward import bound
from prunecli.running.layerwise.reading import Reader
from tests.stock_mixtures import tiny_mixture

CPU = torch.device("cpu")


@pytest.mark.parametrize("model_type", ["mixtral", "gpt_oss", "nemotron_h", "laguna"])
def test_layers_and_experts_are_those_that_were_saved(model_type, tmp_path):
    model = tiny_mixture(model_type)
    model.save_pretrained(tmp_path)
    saved = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with open_model(tmp_path) as checkpoint:
        skeleton = make_model(checkpoint, CPU, torch.float32)
        assert [stage.module for stage in skeleton.stages] == list(_layers(skeleton.model))
        fill_resident(skeleton, checkpoint)
        found = {}
        with Reader(checkpoint, 2, skeleton.widest_bytes, CPU) as reader:
            for stage in skeleton.stages:
                reader.want(stage.block)
                with reader.next_block() as tensors, bound(stage, tensors):
                    found |= {name: tensor.clone() for name, tensor in _held(skeleton.model, stage.name)}
                if stage.mixture is None:
                    continue
                expected = ExpertWeights.of(model.get_submodule(_name(skeleton.model, stage.mixture.module)))
                for expert in (3, 0):
                    reader.want(stage.mixture.block(expert))
                    with reader.next_block() as tensors:
                        assert _equal(ExpertWeights(*tensors), expected[expert])
        found |= {
            name: tensor
            for name, tensor in [*skeleton.model.named_parameters(), *skeleton.model.named_buffers()]
            if not tensor.is_meta
        }
        experts = {
            f"{_name(skeleton.model, stage.mixture.module)}." for stage in skeleton.stages if stage.mixture
        }
    left_out = {name for name in saved if name.startswith((*experts, "lm_head."))}
    assert found.keys() == saved.keys() - left_out
    for name, tensor in found.items():
        assert torch.equal(tensor, saved[name]), name


def _layers(model: torch.nn.Module) -> torch.nn.Module:
    return max(
        (module for module in model.modules() if isinstance(module, torch.nn.ModuleList)),
        key=lambda stack: sum(parameter.numel() for parameter in stack.parameters()),
    )


def _held(model: torch.nn.Module, layer: str) -> list[tuple[str, torch.Tensor]]:
    return [
        (name, tensor)
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
        if name.startswith(f"{layer}.") and not tensor.is_meta
    ]


def _name(model: torch.nn.Module, part: torch.nn.Module) -> str:
    return next(name for name, module in model.named_modules() if module is part)


def _equal(one: ExpertWeights, other: ExpertWeights) -> bool:
    pairs = [(getattr(one, name), getattr(other, name)) for name in ("up", "down", "up_bias", "down_bias")]
    return all(a is b if a is None or b is None else torch.equal(a, b) for a, b in pairs)
