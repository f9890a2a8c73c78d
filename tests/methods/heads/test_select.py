"""Which heads go: against a slow restatement, and by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from prunecli.errors import UsageError
from prunecli.methods.heads.select import (
    Request,
    normalized,
    random_importance,
    removed_count,
    select_heads,
)
from tests.reference import heads as reference

Model = dict[str, list[int]]
models = st.dictionaries(
    st.sampled_from(["a", "b", "c"]),
    st.lists(st.integers(-20, 50), min_size=1, max_size=5),
    min_size=1,
)


class Layer(NamedTuple):
    """What is chosen from."""

    name: str
    kind: Any
    heads: tuple[int, ...]


def layers_of(model: Mapping[str, Sequence[float]], kinds: Mapping[str, Any] | None = None) -> list[Layer]:
    return [
        Layer(name, (kinds or {}).get(name, "encoder"), tuple(range(len(values))))
        for name, values in model.items()
    ]


def importance_of(model: Mapping[str, Sequence[float]]) -> dict[str, dict[int, float]]:
    return {name: dict(enumerate(map(float, values))) for name, values in model.items()}


def kept(model: Mapping[str, Sequence[float]], **request: Any) -> dict[str, tuple[int, ...]]:
    return dict(select_heads(layers_of(model), importance_of(model), Request(**request)))


@given(model=models, minimum=st.integers(0, 3), data=st.data())
def test_heads_go_one_by_one_least_important_first(model: Model, minimum: int, data: st.DataObject) -> None:
    free = sum(max(len(layer) - minimum, 0) for layer in model.values())
    count = data.draw(st.integers(0, free))
    exact = {name: [Fraction(value) for value in layer] for name, layer in model.items()}
    wanted = reference.remaining(exact, count, minimum)
    assert kept(model, count=count, minimum=minimum, normalize="none") == wanted


@given(model=models, minimum=st.integers(0, 3), data=st.data())
def test_normalised_heads_go_in_the_order_of_their_share(
    model: Model, minimum: int, data: st.DataObject
) -> None:
    exact = {name: reference.normalized(layer) for name, layer in model.items()}
    every = [value for layer in exact.values() for value in layer]
    assume(len(set(every)) == len(every))  # ties of different layers are decided by rounding
    free = sum(max(len(layer) - minimum, 0) for layer in model.values())
    count = data.draw(st.integers(0, free))
    wanted = reference.remaining(exact, count, minimum)
    assert kept(model, count=count, minimum=minimum) == wanted


def test_normalisation_by_hand() -> None:
    found = normalized({"a": {0: 3.0, 2: 4.0}, "b": {1: 0.0, 0: 0.0}, "c": {5: -2.0}, "d": {}})
    assert found == {"a": {0: 0.6, 2: 0.8}, "b": {1: 0.0, 0: 0.0}, "c": {5: -1.0}, "d": {}}


def test_importances_too_small_to_be_squared_are_normalised() -> None:
    assert normalized({"a": {0: 3e-300, 1: 4e-300}})["a"] == pytest.approx({0: 0.6, 1: 0.8})


def test_a_layer_of_small_gradients_is_kept_only_where_layers_are_normalised() -> None:
    model = {"small": [0.001, 0.003], "large": [1.0, 5.0]}
    assert kept(model, count=2) == {"small": (1,), "large": (1,)}
    assert kept(model, count=2, normalize="none") == {"small": (), "large": (0, 1)}


def test_equal_importances_go_by_place_in_the_model() -> None:
    model = {"b": [1, 1, 1], "a": [3, 3, 3]}
    assert kept(model, count=4) == {"b": (), "a": (1, 2)}
    assert kept(model, count=4, minimum=1) == {"b": (2,), "a": (2,)}


def test_heads_that_are_gone_count_in_the_norm_so_that_steps_equal_one_leap() -> None:
    model = {"a": [1.0, 2.0, 9.0, 4.0], "b": [5.0, 5.0, 1.0, 6.0], "c": [1.0, 1.0, 1.0, 8.0]}
    first = select_heads(layers_of(model), importance_of(model), Request(count=4))
    left = [Layer(layer.name, layer.kind, first[layer.name]) for layer in layers_of(model)]
    second = select_heads(left, importance_of(model), Request(count=3))
    assert second == select_heads(layers_of(model), importance_of(model), Request(count=7))


def test_heads_stay_in_the_order_in_which_they_are_stored() -> None:
    layer = Layer("a", "cross", (7, 2, 5))
    selection = select_heads([layer], {"a": {2: 1.0, 5: 3.0, 7: 2.0}}, Request(count=1))
    assert selection == {"a": (7, 5)}


def test_only_the_kinds_named_lose_heads_and_are_counted() -> None:
    model = {"e": [1] * 10, "d": [1] * 10, "x": [1] * 10}
    layers = layers_of(model, {"e": "encoder", "d": "decoder", "x": "cross"})
    selection = select_heads(layers, importance_of(model), Request(ratio=0.25, kinds=("decoder",)))
    assert {name: len(ids) for name, ids in selection.items()} == {"e": 10, "d": 7, "x": 10}


@pytest.mark.parametrize(
    ("ratio", "held", "removed"),
    [(0.0, 10, 0), (0.2, 96, 20), (0.7, 10, 7), (0.1, 30, 3), (0.01, 12, 1), (0.99, 12, 12), (0.5, 0, 0)],
)
def test_never_less_than_the_ratio_goes(ratio: float, held: int, removed: int) -> None:
    assert removed_count(ratio, held) == removed


@pytest.mark.parametrize("ratio", [-0.1, 1.0, 20.0, float("nan")])
def test_ratios_outside_of_their_range_are_refused(ratio: float) -> None:
    with pytest.raises(UsageError, match="outside"):
        removed_count(ratio, 10)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request(count=9), "9 heads would go; the 2 attentions hold 8: at most 8 can"),
        (Request(count=5, minimum=2), "of which each layer keeps 2: at most 4 can"),
        (Request(count=-1), "-1 heads"),
        (Request(count=1, kinds=("encoder", "cross")), "--attention cross: the model has no such attention"),
    ],
)
def test_requests_that_cannot_be_met_are_refused(request_: Request, message: str) -> None:
    model = {"a": [1, 2, 3, 4], "b": [1, 2, 3, 4]}
    with pytest.raises(UsageError, match=message):
        select_heads(layers_of(model), importance_of(model), request_)


@given(
    values=st.lists(st.lists(st.integers(-20, 50), min_size=4, max_size=4), min_size=1, max_size=4),
    ratio=st.floats(0, 0.7),
)
def test_uniform_layers_keep_the_same_number_and_enough_goes(values: list[list[int]], ratio: float) -> None:
    """The best of each layer, so many that no stock number between would still remove what is asked."""
    model = {f"layer {number}": layer for number, layer in enumerate(values)}
    allowed = (1, 2, 4)
    found = kept(model, ratio=ratio, normalize="none", uniform=allowed)
    (each,) = {len(ids) for ids in found.values()}
    held = 4 * len(values)
    left = held - removed_count(ratio, held)
    assert each == max(number for number in allowed if number * len(values) <= left)
    for name, ids in found.items():
        gone = [model[name][head] for head in range(4) if head not in ids]
        assert list(ids) == sorted(ids)
        assert all(value <= min(model[name][head] for head in ids) for value in gone)


def test_uniform_keeps_the_kinds_that_may_not_lose_heads() -> None:
    layers = layers_of({"a": [1, 2, 3], "b": [3, 2, 1]}, {"b": "decoder"})
    importance = importance_of({"a": [1, 2, 3], "b": [3, 2, 1]})
    request = Request(count=1, kinds=("decoder",), uniform=(1, 2, 3))
    assert select_heads(layers, importance, request) == {"a": (0, 1, 2), "b": (0, 1)}


@pytest.mark.parametrize(
    ("uniform", "options"),
    [((4,), {"ratio": 0.25}), ((1, 2), {"ratio": 0.25, "minimum": 3}), ((2,), {"count": 5})],
)
def test_a_number_that_no_stock_model_has_is_refused(
    uniform: tuple[int, ...], options: dict[str, Any]
) -> None:
    with pytest.raises(UsageError, match="--uniform: at most"):
        kept({"a": [1, 2, 3, 4], "b": [1, 2, 3, 4]}, uniform=uniform, **options)


def test_random_importances_depend_on_the_seed_alone() -> None:
    original = {"a": 4, "b": 4}
    assert random_importance(original, 1) == random_importance(original, 1) != random_importance(original, 2)
    assert all(
        0 < value <= 1 for layer in random_importance(original, 1).values() for value in layer.values()
    )
