import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prunecli.errors import UsageError
from prunecli.running.layerwise.budget import MIN_STATES, SPREAD, WORKSPACE, Demand, plan_memory
from prunecli.tensors.quantities import parse_size, size_text

MIB, GIB = 1 << 20, 1 << 30
DEMAND = Demand(process=400 * MIB, resident=2 * GIB, block=256 * MIB, activations=300 * MIB)


def test_what_is_left_is_for_states():
    plan = plan_memory(8 * GIB, DEMAND)
    assert plan.buffers == 3
    assert plan.states == 8 * GIB - (400 + 2048 + 3 * 256 + 300) * MIB - WORKSPACE


def test_a_buffer_less_where_three_find_no_room():
    fixed = (400 + 2048 + 300) * MIB + WORKSPACE + MIN_STATES
    assert plan_memory(fixed + 3 * 256 * MIB, DEMAND).buffers == 3
    assert plan_memory(fixed + 3 * 256 * MIB - 1, DEMAND).buffers == 2


@given(st.tuples(*[st.integers(0, 1 << 38)] * 4))
def test_the_smallest_that_is_named_works_and_little_less_does_not(sizes):
    demand = Demand(*sizes)
    with pytest.raises(UsageError) as caught:
        plan_memory(1, demand)
    named = re.search(r"smallest that works is (\S+)", caught.value.message)
    assert named
    smallest = parse_size(named[1])
    assert plan_memory(smallest, demand).states >= MIN_STATES
    with pytest.raises(UsageError, match="too little"):
        plan_memory(int(smallest * 0.98) - 2 * MIB - SPREAD, demand)
    assert caught.value.exit_status == 2


@given(st.integers(1, 1 << 41))
def test_sizes_are_rounded_up_and_read_back(size):
    assert size <= parse_size(size_text(size)) <= max(size + MIB, size * 1.011)
