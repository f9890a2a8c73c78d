"""Metrics from sums equal the paper's definitions, token by token."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from prunecli.errors import StatisticsError, UsageError
from prunecli.methods.experts.metrics import (
    METRICS,
    default_metric,
    metric_named,
    metric_values,
)
from prunecli.methods.units import random_values
from prunecli.model.axes import Axis
from prunecli.results.gates import SUMS, TEXT_SUMS, GateStatistics, GateSums
from tests.gates import changed, gate_statistics
from tests.reference import expert_metrics, routed_outputs

OF_GATES = [name for name, metric in METRICS.items() if set(metric.needs) <= set(SUMS)]


def routed(seed: int, tokens: int, experts: int) -> list[list[float]]:
    logits = np.random.default_rng(seed).normal(size=(tokens, experts)) * 3
    gates = np.exp(logits)
    return (gates / gates.sum(axis=1, keepdims=True)).tolist()


def sums_of(*layers: list[list[float]]) -> GateSums:
    counted = [expert_metrics.sums(gates) for gates in layers]
    arrays = {name: np.array([c[name] for c in counted]) for name in SUMS[1:]}
    return GateSums(tokens=np.array([len(gates) for gates in layers]), **arrays)


def tokens_of(seed: int, tokens: int, experts: int, top_k: int = 3) -> list[routed_outputs.Token]:
    """Random routing: indices in any order, weights that need not sum to 1, norms up to 10."""
    generator = np.random.default_rng(seed)
    return [
        (
            generator.permutation(experts)[:top_k].tolist(),
            generator.random(top_k).tolist(),
            (10 * generator.random(top_k)).tolist(),
        )
        for _ in range(tokens)
    ]


def text_sums_of(experts: int, *layers: list[routed_outputs.Token]) -> GateSums:
    counted = [routed_outputs.sums(tokens, experts) for tokens in layers]
    arrays = {name: np.array([c[name] for c in counted]) for name in TEXT_SUMS[1:]}
    return GateSums(tokens=np.array([len(tokens) for tokens in layers]), **arrays)


def statistics_of(sums: GateSums, lacks: frozenset[str] = frozenset()) -> GateStatistics:
    layers, experts = sums.top1.shape
    names = tuple(f"model.encoder.layers.{n}.ffn" for n in range(layers))
    return gate_statistics("sha256:0", "nllb-moe", "forced", names, experts, 2, {"a-b": sums}, lacks)


@pytest.mark.parametrize("name", OF_GATES)
@given(seed=st.integers(0, 10**6), tokens=st.integers(1, 12), experts=st.integers(2, 6))
def test_metrics_are_those_of_the_paper(name: str, seed: int, tokens: int, experts: int) -> None:
    layers = routed(seed, tokens, experts), routed(seed + 1, tokens + 3, experts)
    values = METRICS[name].values(sums_of(*layers))
    for row, gates in zip(values, layers, strict=True):
        assert_allclose(row, expert_metrics.metric(name, gates), rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", METRICS)
@given(seed=st.integers(0, 10**6), tokens=st.integers(1, 12), experts=st.integers(3, 7))
def test_metrics_of_language_models_are_those_of_the_raw_routing(
    name: str, seed: int, tokens: int, experts: int
) -> None:
    layers = tokens_of(seed, tokens, experts), tokens_of(seed + 1, tokens + 3, experts)
    values = METRICS[name].values(text_sums_of(experts, *layers))
    for row, raw in zip(values, layers, strict=True):
        assert_allclose(row, routed_outputs.metric(name, raw, experts), rtol=1e-12, atol=0)


def test_reap_by_hand() -> None:
    # Expert 0: (0.5 x 2 + 0.25 x 4) / 2 = 1; expert 1: 0.5 x 6 = 3, its one token; expert 2: 0.75 x 4 / 1 = 3.
    tokens = [((0, 1), (0.5, 0.5), (2.0, 6.0)), ((2, 0), (0.75, 0.25), (4.0, 4.0))]
    sums = text_sums_of(4, tokens)
    assert_allclose(METRICS["reap"].values(sums)[0], [1.0, 3.0, 3.0, 0.0])
    assert_allclose(METRICS["man"].values(sums)[0], [3.0, 6.0, 4.0, 0.0])


def test_importance_by_hand() -> None:
    # Expert 0: first for 3 of 4 tokens at gates 0.5, 0.7, 0.6, so 0.75 x exp(0.6); expert 1: 0.25 x exp(0.9).
    gates = [[0.5, 0.3, 0.2], [0.7, 0.2, 0.1], [0.6, 0.1, 0.3], [0.05, 0.9, 0.05]]
    values = METRICS["importance"].values(sums_of(gates))[0]
    assert_allclose(values, [0.75 * np.exp(0.6), 0.25 * np.exp(0.9), 0.0])


@given(st.integers(0, 10**6), st.integers(1, 8), st.integers(1, 8))
def test_adding_sums_of_texts_is_counting_both(seed: int, first: int, second: int) -> None:
    a, b = tokens_of(seed, first, 5), tokens_of(seed + 1, second, 5)
    added, together = text_sums_of(5, a) + text_sums_of(5, b), text_sums_of(5, a + b)
    assert (added.routed == together.routed).all()
    assert (added.norm_max == together.norm_max).all()
    for name in METRICS:
        assert_allclose(METRICS[name].values(added), METRICS[name].values(together), rtol=1e-12)


def test_a_layer_without_tokens_gives_zeros() -> None:
    for metric in METRICS.values():
        assert (metric.values(GateSums.zeros(2, 3, TEXT_SUMS)) == 0).all()


def test_values_are_named_by_axis() -> None:
    sums = sums_of(routed(0, 9, 3), routed(1, 9, 3))
    values = metric_values("top1", sums, statistics_of(sums))
    assert list(values) == [
        "model.encoder.layers.0.ffn.experts",
        "model.encoder.layers.1.ffn.experts",
    ]
    assert_allclose(sum(values["model.encoder.layers.1.ffn.experts"]), 1.0)


def test_random_values_repeat_with_the_seed() -> None:
    axes = [Axis("a", "expert", (0, 2), 5), Axis("b", "expert", (1,), 7)]
    first, again, other = (random_values(axes, seed) for seed in (1, 1, 2))
    assert all((first[name] == again[name]).all() and (first[name] != other[name]).any() for name in "ab")
    assert [len(values) for values in first.values()] == [5, 7]
    assert all((values > 0).all() for values in first.values())


def test_an_unknown_metric_is_refused() -> None:
    with pytest.raises(UsageError, match="No metric 'entropy'"):
        metric_named("entropy")


def test_a_metric_whose_sums_the_file_lacks_is_refused_with_those_that_work() -> None:
    sums = sums_of(routed(0, 9, 3))
    statistics = changed(statistics_of(sums), lacks=frozenset({"gate_sum", "conf1_sum"}))
    with pytest.raises(
        StatisticsError, match=r"lack what the metric 'load-balance' needs .*gate_sum"
    ) as refused:
        metric_values("load-balance", sums, statistics)
    assert refused.value.remedy == "Choose `metric=top1 or top2`."


def test_statistics_of_translation_lack_what_outputs_give() -> None:
    sums = sums_of(routed(0, 9, 3))
    for name in ("reap", "seer"):
        with pytest.raises(StatisticsError, match=f"metric '{name}' needs .*routed") as refused:
            metric_values(name, sums, statistics_of(sums))
        assert str(refused.value.remedy).startswith("Choose `metric=importance or ")
        assert "ean" not in str(refused.value.remedy)


def test_the_default_metric_goes_by_the_kind_of_statistics() -> None:
    sums = text_sums_of(3, tokens_of(0, 9, 3))
    statistics = statistics_of(sums)
    assert default_metric(statistics) == "importance"
    texts = changed(statistics, mode="text")
    assert default_metric(texts) == "reap"
    assert set(metric_values("reap", sums, texts)) == {"model.encoder.layers.0.ffn.experts"}
