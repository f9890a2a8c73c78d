"""The smallest ratio that fits a memory: sizes counted by hand, one expert more would not fit."""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from prunecli.errors import UsageError
from prunecli.methods.experts.options import SCOPES, MemoryFit, explain, smallest_ratio
from prunecli.model.checkpoint import open_model
from prunecli.model.cost import usual_load
from prunecli.selection.select import Budget
from prunecli.tensors.quantities import exact_share
from tests.tiny import random_tensors, tiny_config, tiny_nllb_moe

EXPERT = (16 * 32 + 32 + 32 * 16 + 16 + 16) * 4
"""Bytes of one expert of the tiny model in float32: two linear layers, and its row of the router."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_nllb_moe(tmp_path_factory.mktemp("model") / "full", vocab=64)


def fit(
    model: Path, budget: int, strategy: str = "per-layer", dtype: str | None = None, **load: int
) -> MemoryFit:
    request = Budget(scope=SCOPES[strategy], balance=Fraction(3), least=2)  # type: ignore[index]
    with open_model(model) as checkpoint:
        return smallest_ratio(checkpoint, budget, usual_load(checkpoint, **load), request, dtype=dtype)


def test_the_parts_are_those_counted_by_hand(model: Path) -> None:
    found = fit(model, 10**9, batch=2, beam=3, length=10)
    weights = sum(array.nbytes for array in random_tensors(tiny_config(8, 16, 32, 4, 2, 64)).values())
    assert (found.keep, found.held, found.ratio) == (32, 32, 0.0)
    assert found.experts == 32 * EXPERT
    assert found.dense + found.experts == weights
    hidden = 6 * 10 * 16 * 4  # sequences x tokens x d_model x bytes
    assert found.cache == 2 * 2 * hidden * 5  # keys and values, own and cross, 4 layers and one to reorder
    assert found.activations == 2 * 10 * (4 * 16 + 32) * 4 + hidden + 6 * 64 * 3 * 4
    assert found.margin == 10**8


@pytest.mark.parametrize("strategy", ["per-layer", "global-threshold", "side-threshold"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_one_step_less_would_not_fit(strategy: str, dtype: str, model: Path) -> None:
    full = fit(model, 10**9, strategy, dtype=dtype)
    each = full.experts // full.held
    for keep in range(8, 33):
        needed = full.dense + full.cache + full.activations + keep * each
        budget = -(-needed * 10 // 9)
        found = fit(model, budget, strategy, dtype=dtype)
        assert found.total <= budget - found.margin
        assert 8 <= found.keep <= keep
        if strategy != "per-layer":
            assert found.keep >= keep - 3  # a step of a threshold's sides is up to 4 experts
        if strategy == "global-threshold":
            assert found.keep == keep
        assert 32 - math.ceil(exact_share(found.ratio, "experts", 0.8) * 32) == found.keep


def test_a_memory_that_nothing_fits_is_refused_with_the_arithmetic(model: Path) -> None:
    with pytest.raises(UsageError, match=r"No ratio fits in 9\.77 KiB: with 2 experts per layer") as refused:
        fit(model, 10_000)
    assert "`fit_batch`" in str(refused.value.remedy)


def test_the_arithmetic_is_said(model: Path) -> None:
    full = fit(model, 10**9)
    found = fit(model, (full.total - full.experts // 2) * 10 // 9)
    text = "\n".join(explain(found))
    assert f"{found.keep} of 32 experts stay" in text
    assert f"ratio is {found.ratio:g}" in text
    assert "10%" in text
    assert np.isclose(found.ratio, 1 - found.keep / 32, atol=1e-4)
