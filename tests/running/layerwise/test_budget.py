"""The arithmetic of `--memory`."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prunecli.errors import UsageError
from prunecli.running.layerwise.budget import (
    MIN_STATES,
    WORKSPACE,
    Demand,
    Shape,
    activation_bytes,
    backward_bytes,
    output_bytes,
    plan_memory,
    size_text,
    state_bytes,
)
from prunecli.tensors.quantities import parse_size

MIB, GIB = 1 << 20, 1 << 30
DEMAND = Demand(process=400 * MIB, resident=2 * GIB, block=256 * MIB, activations=300 * MIB)


def test_what_is_left_is_for_states() -> None:
    plan = plan_memory(8 * GIB, DEMAND)
    assert plan.buffers == 3
    assert plan.states == 8 * GIB - (400 + 2048 + 3 * 256 + 300) * MIB - WORKSPACE


def test_a_buffer_less_where_three_find_no_room() -> None:
    fixed = (400 + 2048 + 300) * MIB + WORKSPACE + MIN_STATES
    assert plan_memory(fixed + 3 * 256 * MIB, DEMAND).buffers == 3
    assert plan_memory(fixed + 3 * 256 * MIB - 1, DEMAND).buffers == 2


@given(st.tuples(*[st.integers(0, 1 << 38)] * 4))
def test_the_smallest_that_is_named_works_and_little_less_does_not(sizes: tuple[int, ...]) -> None:
    demand = Demand(*sizes)
    with pytest.raises(UsageError) as caught:
        plan_memory(1, demand)
    named = re.search(r"smallest that works is (\S+)", caught.value.message)
    assert named
    smallest = parse_size(named[1])
    assert plan_memory(smallest, demand).states >= MIN_STATES
    with pytest.raises(UsageError, match="too little"):
        plan_memory(int(smallest * 0.98) - 2 * MIB, demand)
    assert caught.value.exit_status == 2


@given(st.integers(1, 1 << 41))
def test_sizes_are_rounded_up_and_read_back(size: int) -> None:
    assert size <= parse_size(size_text(size)) <= max(size + MIB, size * 1.011)


def test_activations_by_hand() -> None:
    shape = Shape(d_model=8, ffn_dim=32, heads=2, experts=4, top_k=2, itemsize=2)
    tokens, keys = 3 * 5, 7
    dense = tokens * 10 * 8 + tokens * 2 * 32 + 3 * keys * 4 * 8 + 3 * 3 * 2 * 5 * 7
    sparse = tokens * 4 * (3 * 2 * 8 + 8 * 4)
    assert activation_bytes(shape, 3, 5, keys) == 2 * dense + sparse


def test_the_way_back_by_hand() -> None:
    shape = Shape(d_model=8, ffn_dim=32, heads=2, experts=4, top_k=2, itemsize=2)
    tokens, keys = 3 * 5, 7
    dense = tokens * (24 * 8 + 10 * 32) + 3 * keys * 8 * 8 + 5 * 3 * 2 * 5 * 7
    sparse = tokens * 4 * (8 * 2 * 8 + 12 * 4)
    assert backward_bytes(shape, 3, 5, keys) == 2 * dense + sparse
    assert backward_bytes(shape, 3, 5, keys) > activation_bytes(shape, 3, 5, keys)


@pytest.mark.parametrize(("itemsize", "forward", "back"), [(4, 8, 12), (2, 10, 16)])
def test_logits_by_hand(itemsize: int, forward: int, back: int) -> None:
    """float32: logits, logarithms; back: those with two gradients. bfloat16: the same and a copy in float32."""
    shape = Shape(d_model=8, ffn_dim=32, heads=2, experts=0, top_k=1, itemsize=itemsize)
    between = 15 * 12 * 8 * itemsize
    assert output_bytes(shape, 1000, 15, backward=False) == 15 * 1000 * forward + between
    assert output_bytes(shape, 1000, 15, backward=True) == 15 * 1000 * back + between


def test_states_by_hand() -> None:
    shape = Shape(d_model=8, ffn_dim=32, heads=2, experts=4, top_k=2, itemsize=2)
    assert state_bytes(shape, 20, 13) == 20 * 8 * 2 + 13 * 2 * 8 * 4
    assert state_bytes(Shape(8, 32, 2, 0, 1, 4), 20, 13) == 20 * 8 * 4
