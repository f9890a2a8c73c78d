"""Which units stay: against a slow restatement, and by hand."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prunecli.errors import UsageError
from prunecli.methods.experts.options import SCOPES
from prunecli.methods.options import parse_balance
from prunecli.methods.plans import normalized
from prunecli.model.axes import Axis
from prunecli.selection.cut import decision_of
from prunecli.selection.select import Budget, held_in, released_threshold, select, shares, threshold
from tests.reference import expert_selection, released_statistics
from tests.reference import heads as reference

models = st.dictionaries(
    st.sampled_from(["a", "b", "c"]), st.lists(st.integers(-20, 50), min_size=1, max_size=5), min_size=1
)


def kept(model: Mapping[str, Sequence[float]], **budget: Any) -> dict[str, tuple[int, ...]]:
    values = {name: np.array(own, np.float64) for name, own in model.items()}
    axes = [Axis(name, "head", tuple(range(len(own))), len(own)) for name, own in model.items()]
    return select(axes, values, Budget(**{"scope": "model", **budget}))[0]


@given(model=models, least=st.integers(0, 3), data=st.data())
def test_units_go_one_by_one_the_lowest_first(model, least, data):
    free = sum(max(len(own) - least, 0) for own in model.values())
    count = data.draw(st.integers(0, free))
    exact = {name: [Fraction(value) for value in own] for name, own in model.items()}
    assert kept(model, count=count, least=least) == reference.remaining(exact, count, least)


def test_normalisation_by_hand():
    model = {"a": [3.0, 4.0], "b": [0.0, 0.0], "c": [-2.0], "d": []}
    found = normalized({name: np.array(own) for name, own in model.items()})
    expected = {"a": [0.6, 0.8], "b": [0.0, 0.0], "c": [-1.0], "d": []}
    assert {name: own.tolist() for name, own in found.items()} == expected


@pytest.mark.parametrize(
    ("ratio", "held", "removed"),
    [(0.0, 10, 0), (0.7, 10, 7), (0.1, 30, 3), (0.99, 12, 12), (0.5, 0, 0)],
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


@pytest.mark.parametrize("ratio", [-0.1, 1.0, float("nan")])
def test_ratios_outside_of_their_range_are_refused(ratio):
    with pytest.raises(UsageError, match="outside"):
        kept({"a": [1]}, ratio=ratio)


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        ({"count": 9}, "9 heads would be removed; 2 axes hold 8: at most 8 can"),
        ({"count": 5, "least": 2}, "of which each keeps 2: at most 4 can"),
        ({"count": -1}, "-1 heads"),
        ({"ratio": 0.25, "even": (4,)}, "uniform`: at most 3 heads"),
        ({"ratio": 0.25, "even": (1, 2), "least": 3}, "uniform`: at most 3 heads"),
        ({"count": 5, "even": (2,)}, "uniform`: at most 1 heads"),
    ],
)
def test_budgets_that_cannot_be_met_are_refused(budget, message):
    with pytest.raises(UsageError, match=message):
        kept({"a": [1, 2, 3, 4], "b": [1, 2, 3, 4]}, **budget)


def test_places_are_compared_together_alone_or_by_group():
    axes = [
        Axis("m.0.heads", "head", (2, 0), 3, "encoder", 0, "encoder"),
        Axis("m.1.heads", "head", (0, 1), 3, "decoder", 1, "cross"),
    ]
    values = {"m.0.heads": np.array([5.0, 7.0]), "m.1.heads": np.array([1.0, 2.0])}
    kept = {"m.0.heads": (2,), "m.1.heads": ()}
    first, second = decision_of(axes, kept, values, Budget(scope="model")).places
    assert (first.name, first.side, first.layer) == ("m.0.heads", "encoder", 0)
    assert (first.attention, first.cut) == ("encoder", "heads")
    assert first.ids.tolist() == [0, 2]
    assert first.kept.tolist() == [False, True]
    assert first.values.tolist() == [7.0, 5.0]
    assert (second.attention, second.num_kept) == ("cross", 0)
    parted = decision_of(axes[:1], {"m.0.heads": (2,)}, None, Budget(groups=2)).places
    found = [(place.cut, place.ids.tolist()) for place in parted]
    assert found == [("m.0.heads, group 0", [2]), ("m.0.heads, group 1", [0])]


# Budgets, thresholds and selections against slow restatements and the paper's own numbers.


def experts(name: str, side: str, ids: Iterable[int]) -> Axis:
    held = tuple(ids)
    return Axis(name, "expert", held, len(held), side)


def model(encoder: int, decoder: int, width: int) -> list[Axis]:
    return [
        experts(f"model.{side}.layers.{n}.ffn.experts", side, range(width))
        for side, layers in (("encoder", encoder), ("decoder", decoder))
        for n in range(layers)
    ]


def keeping(axes: list[Axis], keep: int, strategy: str = "per-layer", **more: Any) -> Budget:
    """The budget that keeps so many experts, at least 2 in a layer."""
    defaults = {"balance": Fraction(1), "least": 2, "scope": SCOPES[strategy]}  # type: ignore[index]
    return Budget(count=held_in(axes) - keep, **(defaults | more))


def counts_of(
    axes: list[Axis], keep: int, balance: Fraction, minimum: int, step: int = 1, strategy: str = "per-layer"
) -> dict[str, int]:
    return keeping(axes, keep, strategy, balance=balance, least=minimum, multiple=step).shared_out(axes)


def keep_count(ratio: float, held: int) -> int:
    return held - Budget(ratio).removed([experts("a", "decoder", range(held))])


NLLB = model(6, 6, 128)


@pytest.mark.parametrize(
    ("ratio", "balance", "encoder", "decoder"),
    [
        (0.8, "3:1", 36, 12),  # the published choice: 288 of 1536
        (0.75, "1:1", 32, 32),  # 4.3: 384 of 1536
        (0.75, "5:3", 40, 24),  # 4.3: unbalanced
        (0.25, "3:1", 128, 64),  # 3:1 would be 144 : 48; the encoder has 128
        (0.25, "1:3", 64, 128),
        (0.98, "3:1", 3, 2),  # 30 stay: 3 x 1 would leave the decoder below the router's 2
    ],
)
def test_paper_and_corner_budgets(ratio, balance, encoder, decoder):
    counts = counts_of(NLLB, keep_count(ratio, 1536), parse_balance(balance), 2)
    assert list(counts.values()) == [encoder] * 6 + [decoder] * 6


balances = st.sampled_from(
    [Fraction(1, 3), Fraction(1), Fraction(3, 2), Fraction(5, 3), Fraction(2), Fraction(3)]
)


@given(
    st.tuples(st.integers(0, 5), st.integers(1, 5), st.integers(2, 20)),
    st.integers(0, 999),
    balances,
    st.integers(1, 6),
    st.integers(1, 8),
)
def test_layer_counts_are_those_of_trying_every_number(shape, thousandths, balance, minimum, step):
    encoder, decoder, width = shape
    held, minimum = (encoder + decoder) * width, min(minimum, width)
    ratio = thousandths / 1000
    keep, layers = keep_count(ratio, held), model(*shape)
    least = -(-minimum // step) * step
    if least > width or keep < least * (encoder + decoder):
        with pytest.raises(UsageError, match=r"would be kept|no multiple of"):
            counts_of(layers, keep, balance, minimum, step)
        return
    counts = list(counts_of(layers, keep, balance, minimum, step).values())
    wanted = expert_selection.fixed_per_layer(encoder, decoder, width, keep, balance, least, step)
    assert counts == [wanted[0]] * encoder + [wanted[1]] * decoder
    assert held - sum(counts) >= Fraction(str(ratio)) * held  # never less removed than asked


def test_side_counts_follow_the_balance_of_layers():
    sides = partial(counts_of, strategy="side-threshold")
    assert sides(NLLB, 384, Fraction(1), 4) == {"encoder": 192, "decoder": 192}  # 4.3's example
    assert sides(NLLB, 307, Fraction(3), 4) == {"encoder": 228, "decoder": 76}
    assert sides(model(2, 6, 16), 48, Fraction(3), 2) == {"encoder": 24, "decoder": 24}
    assert sides(NLLB, 1152, Fraction(3), 4) == {"encoder": 768, "decoder": 384}


def metric_of(values: Sequence[Sequence[float]]) -> tuple[list[Axis], dict[str, np.ndarray]]:
    """Layers with these values."""
    layers = [experts(f"l{n}", "encoder", range(len(row))) for n, row in enumerate(values)]
    return layers, {layer.name: np.array(row, float) for layer, row in zip(layers, values, strict=True)}


def phi_of(axes: list[Axis], values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {axis.name: shares(axis, values[axis.name]) for axis in axes}


@given(
    st.lists(st.lists(st.integers(0, 60), min_size=5, max_size=5).filter(any), min_size=1, max_size=4),
    st.data(),
)
def test_the_released_threshold_is_that_of_a_slow_restatement(values, data):
    # Sums of 256 make shares and their sums exact in floating point.
    values = [[*row, 256 - sum(row)] if sum(row) <= 256 else [*row[:-1], 0, 256] for row in values]
    minimum = data.draw(st.integers(1, 6))
    count = data.draw(st.integers(minimum * len(values), 6 * len(values)))
    values = [row if sum(row) == 256 else [256, 0, 0, 0, 0, 0] for row in values]
    layers, metric = metric_of(values)
    found, theta = released_threshold(layers, phi_of(layers, metric), count, minimum)
    counts, wanted = released_statistics.threshold_counts(values, count, minimum)
    assert list(found.values()) == counts
    assert (sum(counts), theta) == (count, float(wanted))


def test_the_released_threshold_differs_from_equation_5_where_mass_lies_on_few_experts():
    # Layer A has 95 % of its mass on 4 of 128 experts; layer B spreads it evenly. 150 stay, at least 4 each.
    layers = [experts("A", "encoder", range(128)), experts("B", "decoder", range(128))]
    values = {"A": np.array([23.75] * 4 + [5 / 124] * 124), "B": np.ones(128)}
    phi = phi_of(layers, values)
    by_equation, _ = threshold(layers, phi, 150, 4)
    as_released, theta = released_threshold(layers, phi, 150, 4)
    # Mass before the 27th of A: 0.95 + 22 x 0.05 / 124 = 0.9589, before the 123rd of B: 0.9531; before the next ones
    # 0.9593 and 0.9609. Released: all of A's others have 0.05 together; (22 - 4) / 128 = 0.1406 < 0.141 of B.
    assert by_equation == {"A": 27, "B": 123}
    assert as_released == {"A": 128, "B": 22}
    assert theta == 0.141


@given(
    st.sampled_from([1, 2, 3, 4, 6]),
    st.lists(st.lists(st.integers(0, 9), min_size=12, max_size=12).filter(any), min_size=1, max_size=3),
    st.integers(1, 2),
    st.data(),
)
def test_threshold_solves_equation_5_with_the_exact_count(groups, metric, minimum, data):
    """Each rank counts as one expert, as important as those of the rank in all groups are together."""
    layers, values = metric_of(metric)
    width = 12 // groups
    ranked = [np.sort(np.reshape(own, (groups, width)))[:, ::-1] for own in metric]
    together = [own.sum(axis=0).tolist() for own in ranked]
    keep = data.draw(st.integers(minimum * len(metric), width * len(metric)))
    sizes = {"least": minimum * groups, "multiple": groups, "groups": groups}
    kept, _ = select(layers, values, keeping(layers, keep * groups, "global-threshold", **sizes))
    counts = [len(kept[layer.name]) // groups for layer in layers]
    below, above = expert_selection.global_threshold(together, keep, minimum)
    assert sum(counts) == keep
    # Several layers may reach the same theta: any of them may go first.
    assert all(low <= count <= high for low, count, high in zip(below, counts, above, strict=True))
    for layer, count, own in zip(layers, counts, metric, strict=True):
        best = {
            group * width + place
            for group in range(groups)
            for place in expert_selection.sorted_experts(own[group * width : (group + 1) * width])[:count]
        }
        assert set(kept[layer.name]) == best


def test_ties_are_broken_the_same_way_for_every_count():
    layers = model(3, 3, 6)
    values = {layer.name: np.ones(6) for layer in layers}
    selections = [
        select(layers, values, keeping(layers, count, "global-threshold", least=1))[0]
        for count in range(6, 37)
    ]
    chosen = [{(name, e) for name, ids in kept.items() for e in ids} for kept in selections]
    assert [len(kept) for kept in chosen] == list(range(6, 37))
    assert all(small < large for small, large in pairwise(chosen))


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        (keeping(NLLB, 10), "would be kept"),
        (keeping(NLLB, 30, "global-threshold", least=4), "would be kept"),
        (Budget(keep={"encoder": 129, "decoder": 12}, least=2), "2 to 128"),
        (Budget(keep={"encoder": 36, "decoder": 1}, least=2), "2 to 128"),
        (Budget(keep={"encoder": 36, "decoder": 12}, scope="model"), "one count"),
    ],
)
def test_impossible_budgets_are_refused(budget, message):
    values = {axis.name: np.arange(128.0) for axis in NLLB}
    with pytest.raises(UsageError, match=message):
        select(NLLB, values, replace(budget, balance=Fraction(1)))
