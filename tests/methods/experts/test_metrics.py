"""Metrics from sums equal the papers' definitions, token by token."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from safetensors.torch import save_file

from prunecli.errors import CheckpointError, StatisticsError
from prunecli.methods import units
from prunecli.methods.experts import metrics
from prunecli.methods.experts.metrics import (
    METRICS,
    inverse_aimer,
    metric_values,
    parts_of_expert,
)
from prunecli.model.axes import Axis
from prunecli.results.gates import TEXT_SUMS, GateStatistics, GateSums
from prunecli.tensors.directory import find_weights
from prunecli.tensors.reader import TensorReader
from tests.gates import changed, gate_statistics, random_sums
from tests.reference import routed_outputs, weights


def tokens_of(seed: int, tokens: int, experts: int) -> list[routed_outputs.Token]:
    """Random routing to some or all: indices in any order, weights that need not sum to 1, norms up to 10."""
    generator = np.random.default_rng(seed)
    top_k = generator.integers(1, experts, endpoint=True)

    def draw() -> routed_outputs.Token:
        experts_of = generator.permutation(experts)[:top_k].tolist()
        return experts_of, generator.random(top_k).tolist(), (10 * generator.random(top_k)).tolist()

    return [draw() for _ in range(tokens)]


def sums_of(experts: int, *layers: list[routed_outputs.Token]) -> GateSums:
    counted = [routed_outputs.sums(tokens, experts) for tokens in layers]
    arrays = {name: np.array([own[name] for own in counted]) for name in counted[0]}
    return GateSums(tokens=np.array([*map(len, layers)]), **arrays)


def statistics_of(sums: GateSums) -> GateStatistics:
    names = [f"model.encoder.layers.{n}.ffn" for n in range(len(sums.tokens))]
    return gate_statistics(names, {"a-b": sums})


@pytest.mark.parametrize("name", METRICS)
@given(seed=st.integers(0, 10**6), tokens=st.integers(1, 12), experts=st.integers(2, 7))
def test_metrics_are_those_of_the_raw_routing(name, seed, tokens, experts):
    layers = tokens_of(seed, tokens, experts), tokens_of(seed + 1, tokens + 3, experts)
    values = METRICS[name](sums_of(experts, *layers))
    for row, raw in zip(values, layers, strict=True):
        assert_allclose(row, routed_outputs.metric(name, raw, experts), rtol=1e-12, atol=0)


def test_a_layer_without_tokens_gives_zeros():
    for metric in METRICS.values():
        assert (metric(GateSums.zeros(2, 3, TEXT_SUMS)) == 0).all()


def test_random_values_repeat_with_the_seed():
    axes = [Axis("a", "expert", range(5), 5), Axis("b", "expert", range(7), 7)]
    first, again, other = (units.drawn(axes, seed).values for seed in (1, 1, 2))
    assert all((first[name] == again[name]).all() and (first[name] != other[name]).any() for name in "ab")
    assert all((values > 0).all() for values in first.values())
    fewer = units.drawn([Axis("a", "expert", (0, 2), 5), Axis("b", "expert", (1,), 7)], 1).values
    assert (fewer["a"] == first["a"][[0, 2]]).all()
    assert (fewer["b"] == first["b"][[1]]).all()


def test_a_metric_whose_sums_the_file_lacks_is_refused_with_those_that_work():
    sums = random_sums(0, 1, 3)
    statistics = changed(statistics_of(sums), lacks=frozenset({"gate_sum", "conf1_sum"}))
    with pytest.raises(StatisticsError, match=r"lack what .* 'load-balance' needs .*gate_sum") as refused:
        metric_values("load-balance", sums, statistics)
    assert refused.value.remedy == "Choose `metric=top1 or top2`."


SHAPES = {"up_proj.weight": (5, 8), "down_proj.weight": (8, 5), "up_proj.bias": (5,), "gate.weight": (5, 8)}


def reader_of(directory: Path, tensors: Mapping[str, torch.Tensor]) -> TensorReader:
    directory.mkdir(exist_ok=True)
    save_file(dict(tensors), directory / "model.safetensors")
    return TensorReader(directory, find_weights(directory))


def drawn(seed: int, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) ** 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block", [7, 1 << 18])
def test_an_expert_of_its_own_tensors(dtype, block, tmp_path, monkeypatch):
    monkeypatch.setattr(metrics, "BLOCK_ELEMENTS", block)
    tensors = {name: drawn(seed, shape).to(dtype) for seed, (name, shape) in enumerate(SHAPES.items())}
    with reader_of(tmp_path, tensors) as reader:
        parts = parts_of_expert(reader, [*tensors])
        assert [name for name, *_ in parts] == [name for name in tensors if not name.endswith("bias")]
        wanted = weights.aimer(tensors[name].double().numpy() for name, *_ in parts)
        assert_allclose(inverse_aimer(reader, parts), 1 / wanted, rtol=1e-13)


def test_experts_in_stacked_tensors(tmp_path):
    shapes = {"gate_up_proj": (4, 10, 8), "down_proj": (4, 8, 5), "gate_up_proj_bias": (4, 10)}
    tensors = {name: drawn(seed, shape) for seed, (name, shape) in enumerate(shapes.items())}
    with reader_of(tmp_path, tensors) as reader:
        for expert in range(4):
            parts = parts_of_expert(reader, (), [*tensors], expert, 4)
            own = (tensors[name][expert].numpy() for name in ("gate_up_proj", "down_proj"))
            assert_allclose(inverse_aimer(reader, parts), 1 / weights.aimer(own), rtol=1e-13)


def test_weights_of_one_size_are_the_first_to_go_but_for_zeros(tmp_path):
    tensors = {"even": torch.tensor([[0.5, -0.5]]), "zero": torch.zeros(4, 4)}
    with reader_of(tmp_path, tensors) as reader:
        found = [inverse_aimer(reader, parts_of_expert(reader, [name])) for name in tensors]
    assert found == [1, 0]


def test_quantised_weights_are_refused(tmp_path):
    held = {"up_proj.weight": torch.ones(4, 4).to(torch.uint8)}
    with (
        reader_of(tmp_path, held) as reader,
        pytest.raises(StatisticsError, match="is quantised"),
    ):
        parts_of_expert(reader, ["up_proj.weight"])


def test_what_is_no_number_is_refused(tmp_path):
    held = {"up_proj.weight": torch.ones(4, 4)}
    held["up_proj.weight"][2, 2] = float("nan")
    with reader_of(tmp_path, held) as reader, pytest.raises(CheckpointError, match="holds NaN or infinity"):
        inverse_aimer(reader, parts_of_expert(reader, ["up_proj.weight"]))
