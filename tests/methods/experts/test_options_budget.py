"""Balance, the fewest experts that a router can pick from, and the warning about decoders."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prunecli.errors import UsageError
from prunecli.methods.experts.options import default_balance, least_experts, parse_balance, starved
from prunecli.model.axes import Axis
from prunecli.model.sparse_layer import Groups


def experts(name: str, side: str, ids: Iterable[int]) -> Axis:
    held = tuple(ids)
    return Axis(name, "expert", held, len(held), side)


@pytest.mark.parametrize("text", ["", "3", "3:", "0:1", "1:0", "a:b", "-3:1", "1:2:3", "nan:1", ":1"])
def test_a_balance_that_is_none_is_refused(text: str) -> None:
    if text in ("3", "3:"):
        assert parse_balance(text) == 3
        return
    with pytest.raises(UsageError, match="ENCODER:DECODER"):
        parse_balance(text)


@pytest.mark.parametrize(("width", "balance"), [(8, 1), (32, 1), (64, 1), (127, 1), (128, 3), (256, 3)])
def test_the_default_balance_is_the_papers_where_layers_have_as_many_experts(
    width: int, balance: int
) -> None:
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


def test_a_decoder_that_lost_more_before_is_not_warned_of_again() -> None:
    layers = [experts("e", "encoder", range(18)), experts("d", "decoder", range(6))]
    assert starved(layers, {"e": range(10), "d": range(6)}) is None
    assert starved(layers, {"e": range(18), "d": range(4)}) is not None


def can_route(kept_per_group: int, top_k: int, picked: int, at_least: int) -> bool:
    """Whether a router finds `top_k` experts in the `picked` best groups, each scored by its `at_least` best."""
    return kept_per_group >= at_least and kept_per_group * picked >= top_k


@given(st.integers(1, 12), st.integers(1, 8), st.data(), st.sampled_from([1, 2]))
def test_the_fewest_experts_that_a_router_with_groups_can_pick_from(
    top_k: int, groups: int, data: st.DataObject, at_least: int
) -> None:
    picked = data.draw(st.integers(1, groups))
    found = least_experts(top_k, Groups(groups, picked, at_least))
    wanted = next(n for n in range(1, 99) if can_route(n, top_k, picked, at_least))
    assert found == wanted * groups
