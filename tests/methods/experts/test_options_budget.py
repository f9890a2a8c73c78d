from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prunecli.errors import UsageError
from prunecli.methods.experts.options import SCOPES, MemoryFit, default_balance, smallest_ratio, starved
from prunecli.methods.options import parse_balance
from prunecli.model.axes import Axis
from prunecli.model.checkpoint import open_model
from prunecli.model.cost import usual_load
from prunecli.model.sparse_layer import Groups
from prunecli.selection.select import Budget
from tests.tiny import random_tensors, tiny_config, tiny_nllb_moe


def experts(name: str, side: str, ids: Iterable[int]) -> Axis:
    held = tuple(ids)
    return Axis(name, "expert", held, len(held), side)


@pytest.mark.parametrize("text", ["0:1", "1:0", "nan:1"])
def test_a_balance_that_is_none_is_refused(text):
    assert parse_balance("3") == 3
    with pytest.raises(UsageError, match="ENCODER:DECODER"):
        parse_balance(text)


@pytest.mark.parametrize(("width", "balance"), [(8, 1), (32, 1), (64, 1), (127, 1), (128, 3), (256, 3)])
def test_the_default_balance_is_the_papers_where_layers_have_as_many_experts(width, balance):
    layers = [
        experts(f"model.{side}.layers.{n}.ffn.experts", side, range(width))
        for side in ("encoder", "decoder")
        for n in range(2)
    ]
    assert default_balance([width] * 4) == balance
    uneven = {layer.name: range(6 if layer.side == "encoder" else 2) for layer in layers}
    said = starved(layers, uneven)
    assert (said is None) == (balance == 3)
    assert said is None or said.startswith(
        f"Decoder layers keep 2 of {width} experts, encoder layers 6 of {width}"
    )
    assert starved(layers, dict.fromkeys(uneven, range(4))) is None
    assert starved(layers[:2], uneven) is None


def can_route(kept_per_group: int, top_k: int, picked: int, at_least: int) -> bool:
    """Whether a router finds `top_k` experts in the `picked` best groups, each scored by its `at_least` best."""
    return kept_per_group >= at_least and kept_per_group * picked >= top_k


@given(st.integers(1, 12), st.integers(1, 8), st.data(), st.sampled_from([1, 2]))
def test_the_fewest_experts_that_a_router_with_groups_can_pick_from(top_k, groups, data, at_least):
    picked = data.draw(st.integers(1, groups))
    found = Groups(groups, picked, at_least).needed(top_k)
    wanted = next(n for n in range(1, 99) if can_route(n, top_k, picked, at_least))
    assert found == wanted * groups


EXPERT = (16 * 32 + 32 + 32 * 16 + 16 + 16) * 4
"""Bytes of one expert of the tiny model in float32: two linear layers, and its row of the router."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_nllb_moe(tmp_path_factory.mktemp("model") / "full", vocab=64)


def fit(
    model: Path, budget: int, strategy: str = "per-layer", dtype: str | None = None, **load: int
) -> MemoryFit:
    request = Budget(scope=SCOPES[strategy], balance=Fraction(3), least=2)  # type: ignore[index]
    with open_model(model) as checkpoint:
        return smallest_ratio(checkpoint, budget, usual_load(checkpoint, **load), request, dtype=dtype)


def test_the_parts_are_those_counted_by_hand(model):
    found = fit(model, 10**9, batch=2, beam=3, length=10)
    weights = sum(array.nbytes for array in random_tensors(tiny_config(8, 16, 32, 4, 2, 64)).values())
    assert (found.keep, found.held, found.ratio) == (32, 32, 0.0)
    assert found.expert_bytes == 32 * EXPERT
    assert found.dense_bytes + found.expert_bytes == weights
    hidden = 6 * 10 * 16 * 4  # sequences x tokens x d_model x bytes
    # Keys and values, own and cross, 4 layers and one to reorder.
    assert found.cache_bytes == 2 * 2 * hidden * 5
    assert found.activation_bytes == 2 * 10 * (4 * 16 + 32) * 4 + hidden + 6 * 64 * 3 * 4
    assert found.margin_bytes == 10**8


def test_a_memory_that_nothing_fits_is_refused_with_the_arithmetic(model):
    with pytest.raises(UsageError, match=r"No ratio fits in 9\.77 KiB: with 2 experts per layer") as refused:
        fit(model, 10_000)
    assert "`fit_batch`" in str(refused.value.remedy)
