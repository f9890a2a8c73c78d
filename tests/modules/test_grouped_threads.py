"""The pool of threads that experts run in."""

from __future__ import annotations

import pytest
import torch

from prunecli.modules import grouped
from prunecli.modules.grouped import in_threads, pays


@pytest.fixture(autouse=True)
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_each_item_once_without_gradients_each_thread_alone():
    seen = []
    in_threads(lambda item: seen.append((item, torch.get_num_threads(), torch.is_grad_enabled())), range(50))
    assert sorted(seen) == [(item, 1, False) for item in range(50)]


def test_a_failure_reaches_the_caller_and_stops_the_rest():
    begun = []

    def fail(item):
        begun.append(item)
        raise ValueError("at the first item")

    with pytest.raises(ValueError, match="at the first item"):
        in_threads(fail, range(1000))
    assert len(begun) <= 3  # at most one for each thread
    in_threads(begun.append, [1])  # the pool lives on


@pytest.mark.parametrize(
    ("experts", "rows", "per_expert", "worth"),
    [
        (32, 1, grouped.MIN_WEIGHT_BYTES // 32, True),
        (32, grouped.MIN_PRODUCTS >> 10, 32, True),
        (32, 1, grouped.MIN_WEIGHT_BYTES // 32 - 1, False),
        (grouped.MIN_EXPERTS - 1, grouped.MIN_PRODUCTS, 1 << 20, False),
    ],
)
def test_threads_pay_for_enough_work(experts, rows, per_expert, worth):
    sizes = [0, *[rows] * experts, 0]
    assert pays(sizes, per_expert, 1) == worth
    torch.set_num_threads(1)
    assert not pays(sizes, per_expert, 1)
