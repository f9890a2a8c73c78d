"""Which units stay: against a slow restatement, and by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from prunecli.errors import UsageError
from prunecli.methods.heads.plan import normalized
from prunecli.model.axes import Axis
from prunecli.selection.select import Budget, select
from prunecli.selection.selection import decision_of
from tests.reference import heads as reference

Model = dict[str, list[int]]
models = st.dictionaries(
    st.sampled_from(["a", "b", "c"]), st.lists(st.integers(-20, 50), min_size=1, max_size=5), min_size=1
)


def axes_with(model: Mapping[str, Sequence[float]]) -> list[Axis]:
    return [Axis(name, "head", tuple(range(len(own))), len(own)) for name, own in model.items()]


def kept(model: Mapping[str, Sequence[float]], **budget: Any) -> dict[str, tuple[int, ...]]:
    values = {name: np.array(own, np.float64) for name, own in model.items()}
    return select(axes_with(model), values, Budget(**{"scope": "model", **budget}))


@given(model=models, least=st.integers(0, 3), data=st.data())
def test_units_go_one_by_one_the_lowest_first(model, least, data):
    free = sum(max(len(own) - least, 0) for own in model.values())
    count = data.draw(st.integers(0, free))
    exact = {name: [Fraction(value) for value in own] for name, own in model.items()}
    assert kept(model, count=count, least=least) == reference.remaining(exact, count, least)


@given(model=models, least=st.integers(0, 3), data=st.data())
def test_normalised_heads_go_in_the_order_of_their_share(model, least, data):
    exact = {name: reference.normalized(own) for name, own in model.items()}
    every = [value for own in exact.values() for value in own]
    assume(len(set(every)) == len(every))  # ties of different layers are decided by rounding
    free = sum(max(len(own) - least, 0) for own in model.values())
    count = data.draw(st.integers(0, free))
    shares = normalized({name: np.array(own, float) for name, own in model.items()})
    found = kept({name: own.tolist() for name, own in shares.items()}, count=count, least=least)
    assert found == reference.remaining(exact, count, least)


def test_normalisation_by_hand():
    model = {"a": [3.0, 4.0], "b": [0.0, 0.0], "c": [-2.0], "d": []}
    found = normalized({name: np.array(own) for name, own in model.items()})
    expected = {"a": [0.6, 0.8], "b": [0.0, 0.0], "c": [-1.0], "d": []}
    assert {name: own.tolist() for name, own in found.items()} == expected


def test_units_that_are_gone_leave_the_others_as_they_are():
    """Steps equal one leap."""
    model = {"a": [1.0, 2.0, 9.0, 4.0], "b": [5.0, 5.5, 1.5, 6.0], "c": [1.0, 1.2, 1.1, 8.0]}
    values = {name: np.array(own) for name, own in model.items()}
    first = select(axes_with(model), values, Budget(count=4, scope="model"))
    left = [Axis(name, "head", ids, 4) for name, ids in first.items()]
    held = {name: values[name][list(ids)] for name, ids in first.items()}
    assert select(left, held, Budget(count=3, scope="model")) == kept(model, count=7)


@pytest.mark.parametrize(
    ("ratio", "held", "removed"),
    [(0.0, 10, 0), (0.2, 96, 20), (0.7, 10, 7), (0.1, 30, 3), (0.01, 12, 1), (0.99, 12, 12), (0.5, 0, 0)],
)
def test_never_less_than_the_ratio_goes(ratio, held, removed):
    for scope in ("model", "axis"):
        (left,) = kept({"a": [*range(held)]}, ratio=ratio, scope=scope).values()
        assert held - len(left) == removed


@given(
    width=st.integers(1, 200),
    thousandths=st.integers(0, 999),
    step=st.sampled_from([1, 4, 16, 64]),
    data=st.data(),
)
def test_an_axis_keeps_the_next_lower_multiple(width, thousandths, step, data):
    values = data.draw(st.permutations(range(width)))
    ratio = thousandths / 1000
    (left,) = kept({"a": values}, ratio=ratio, scope="axis", least=1, multiple=step).values()
    most = int(width * (1 - Fraction(str(ratio))))
    wanted = max([n for n in range(step, most + 1) if n % step == 0], default=min(step, width))
    assert len(left) == (wanted if most < width else width)
    gone = [values[unit] for unit in range(width) if unit not in left]
    assert not gone or max(gone) < min(values[unit] for unit in left)


@pytest.mark.parametrize("ratio", [-0.1, 1.0, 20.0, float("nan")])
def test_ratios_outside_of_their_range_are_refused(ratio):
    with pytest.raises(UsageError, match="outside"):
        kept({"a": [1]}, ratio=ratio)


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        ({"count": 9}, "9 heads would go; 2 axes hold 8: at most 8 can"),
        ({"count": 5, "least": 2}, "of which each keeps 2: at most 4 can"),
        ({"count": -1}, "-1 heads"),
        ({"ratio": 0.25, "even": (4,)}, "uniform`: at most 3 heads"),
        ({"ratio": 0.25, "even": (1, 2), "least": 3}, "uniform`: at most 3 heads"),
        ({"count": 5, "even": (2,)}, "uniform`: at most 1 heads"),
        ({"keep": {"a": 3, "b": 2}, "groups": 2}, "2 groups divide not both the 4 heads"),
    ],
)
def test_budgets_that_cannot_be_met_are_refused(budget, message):
    with pytest.raises(UsageError, match=message):
        kept({"a": [1, 2, 3, 4], "b": [1, 2, 3, 4]}, **budget)


@given(
    values=st.lists(st.lists(st.integers(-20, 50), min_size=4, max_size=4), min_size=1, max_size=4),
    ratio=st.floats(0, 0.7),
)
def test_even_axes_keep_the_same_number_and_enough_goes(values, ratio):
    """The best of each axis, so many that no number between would still remove what is asked."""
    model = {f"layer {number}": own for number, own in enumerate(values)}
    able = (1, 2, 4)
    found = kept(model, ratio=ratio, even=able)
    (each,) = {len(ids) for ids in found.values()}
    most = int(4 * len(values) * (1 - Fraction(str(ratio))))
    assert each == max(number for number in able if number * len(values) <= most)
    for name, ids in found.items():
        gone = [model[name][head] for head in range(4) if head not in ids]
        assert list(ids) == sorted(ids)
        assert all(value <= min(model[name][head] for head in ids) for value in gone)


@given(values=st.lists(st.integers(0, 9), min_size=12, max_size=12), groups=st.sampled_from([1, 2, 3, 4]))
def test_each_group_keeps_its_best(values, groups):
    each = 12 // groups // 2 or 1
    (left,) = kept({"a": values}, keep={"a": each * groups}, groups=groups).values()
    size = 12 // groups
    for start in range(0, 12, size):
        order = sorted(range(start, start + size), key=lambda unit: (-values[unit], unit))
        assert [unit for unit in left if start <= unit < start + size] == sorted(order[:each])


def test_places_are_compared_together_alone_or_by_group():
    axes = [
        Axis("m.0.heads", "head", (2, 0), 3, "encoder", 0, "encoder"),
        Axis("m.1.heads", "head", (0, 1), 3, "decoder", 1, "cross"),
    ]
    values = {"m.0.heads": np.array([5.0, 7.0]), "m.1.heads": np.array([1.0, 2.0])}
    first, second = decision_of(
        axes, {"m.0.heads": (2,), "m.1.heads": ()}, values, Budget(scope="model")
    ).places
    assert (first.name, first.side, first.layer, first.attention, first.cut) == (
        "m.0.heads",
        "encoder",
        0,
        "encoder",
        "heads",
    )
    assert first.ids.tolist() == [0, 2]
    assert first.kept.tolist() == [False, True]
    assert first.values is not None
    assert first.values.tolist() == [7.0, 5.0]
    assert (second.attention, second.num_kept) == ("cross", 0)
    parted = decision_of(axes[:1], {"m.0.heads": (2,)}, None, Budget(groups=2)).places
    assert [(place.cut, place.ids.tolist()) for place in parted] == [
        ("m.0.heads, group 0", [2]),
        ("m.0.heads, group 1", [0]),
    ]
