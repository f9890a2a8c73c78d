"""AIMER from files: its definition, both layouts, every type, no bit of difference between threads; and refusals."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from numpy.testing import assert_allclose
from safetensors.torch import save_file

from prunecli.errors import CheckpointError, StatisticsError
from prunecli.methods.experts import metrics
from prunecli.methods.experts.metrics import aimer_values, inverse_aimer, parts_of_expert
from prunecli.model.checkpoint import open_model
from prunecli.tensors.directory import find_weights
from prunecli.tensors.reader import TensorReader
from tests.reference import weights
from tests.tiny import tiny_nllb_moe

SHAPES = {
    "gate_proj.weight": (5, 8),
    "up_proj.weight": (5, 8),
    "down_proj.weight": (8, 5),
    "up_proj.bias": (5,),
}


def reader_of(directory: Path, tensors: Mapping[str, torch.Tensor]) -> TensorReader:
    directory.mkdir(exist_ok=True)
    save_file(dict(tensors), directory / "model.safetensors")
    return TensorReader(directory, find_weights(directory))


def drawn(seed: int, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) ** 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block", [7, 1 << 18])
def test_an_expert_of_its_own_tensors(
    dtype: torch.dtype, block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "BLOCK_ELEMENTS", block)
    tensors = {name: drawn(seed, shape).to(dtype) for seed, (name, shape) in enumerate(SHAPES.items())}
    with reader_of(tmp_path, tensors) as reader:
        parts = parts_of_expert(reader, [*tensors])
        assert [name for name, *_ in parts] == [name for name in tensors if not name.endswith("bias")]
        wanted = weights.aimer(tensors[name].double().numpy() for name, *_ in parts)
        assert_allclose(inverse_aimer(reader, parts), 1 / wanted, rtol=1e-13)


def test_experts_in_stacked_tensors(tmp_path: Path) -> None:
    tensors = {
        "gate_up_proj": drawn(0, (4, 10, 8)),
        "down_proj": drawn(1, (4, 8, 5)),
        "gate_up_proj_bias": drawn(2, (4, 10)),
    }
    with reader_of(tmp_path, tensors) as reader:
        for expert in range(4):
            parts = parts_of_expert(reader, (), [*tensors], expert, 4)
            own = (tensors[name][expert].numpy() for name in ("gate_up_proj", "down_proj"))
            assert_allclose(inverse_aimer(reader, parts), 1 / weights.aimer(own), rtol=1e-13)


def test_weights_of_one_size_are_the_first_to_go_but_for_zeros(tmp_path: Path) -> None:
    even, spiky = torch.full((4, 4), 0.5), torch.zeros(4, 4)
    even[0] = -0.5
    spiky[1, 2] = 3.0
    tensors = {"even": even, "spiky": spiky, "normal": drawn(0, (4, 4)), "zero": torch.zeros(4, 4)}
    with reader_of(tmp_path, tensors) as reader:
        found = {name: inverse_aimer(reader, parts_of_expert(reader, [name])) for name in tensors}
    assert found["even"] == 1
    assert found["spiky"] == 4  # sqrt(16 x 9) / 3
    assert found["zero"] == 0 < found["even"] < found["normal"] < found["spiky"]


def test_values_stand_at_original_ids_and_threads_change_no_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    with open_model(tiny_nllb_moe(tmp_path / "model")) as checkpoint:
        layers = checkpoint.require_mixtures()
        several = aimer_values(checkpoint, layers)
        monkeypatch.setattr(metrics, "THREADS", 1)
        one = aimer_values(checkpoint, layers)
        assert list(one) == [f"{layer.name}.experts" for layer in layers]
        for layer in layers:
            values = one[f"{layer.name}.experts"]
            assert (values == several[f"{layer.name}.experts"]).all()
            for place, expert in enumerate(layer.experts):
                own = [
                    checkpoint.read(layer.expert_tensor(place, f"{name}.weight")) for name in ("fc1", "fc2")
                ]
                assert_allclose(values[expert], 1 / weights.aimer(own), rtol=1e-13)


@pytest.mark.parametrize("dtype", [torch.uint8])
def test_quantised_weights_are_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    with (
        reader_of(tmp_path, {"up_proj.weight": torch.ones(4, 4).to(dtype)}) as reader,
        pytest.raises(StatisticsError, match=r"up_proj.weight is quantised"),
    ):
        parts_of_expert(reader, ["up_proj.weight"])


@pytest.mark.parametrize("value", [float("nan")])
def test_what_is_no_number_is_refused(value: float, tmp_path: Path) -> None:
    tensor = torch.ones(4, 4)
    tensor[2, 2] = value
    with (
        reader_of(tmp_path, {"up_proj.weight": tensor}) as reader,
        pytest.raises(CheckpointError, match=r"up_proj.weight holds NaN or infinity"),
    ):
        inverse_aimer(reader, parts_of_expert(reader, ["up_proj.weight"]))
