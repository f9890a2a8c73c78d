"""Axes, scales, strips and trees."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from prunecli.report.charts import Point, Series, chart, tick_text, ticks
from prunecli.report.grids import Scale, Strip, heat_map, scale_of, strips
from prunecli.report.trees import Node, dendrogram, leaf_order, lineage

FINITE = st.floats(-1e9, 1e9, allow_nan=False)


@given(FINITE, FINITE)
def test_ticks_span_the_values_evenly(first, second):
    low, high = sorted((first, second))
    found = ticks(low, high)
    step = found[1] - found[0]
    assert 2 <= len(found) <= 9
    assert found[0] <= low + step * 1e-6
    assert found[-1] >= high - step * 1e-6


def test_ticks_are_round_numbers():
    assert ticks(0, 100) == [0, 20, 40, 60, 80, 100]
    assert [tick_text(value, 0.05) for value in ticks(98.91, 99.08)][:2] == ["98.90", "98.95"]
    assert tick_text(2.5, 2.5) == "2.5"
    assert tick_text(20_000, 5_000) == "20,000"


@given(st.lists(st.tuples(FINITE, FINITE), min_size=1, max_size=20))
def test_every_point_lies_within_the_axes(values):
    made = chart("c", [Series("s", tuple(Point(x, y, "p") for x, y in values), True)], "x", "y")
    for x, y in re.findall(r'<path d="M([\d.-]+) ([\d.-]+)a4', made):
        assert 50 <= float(x) <= 440
        assert 0 <= float(y) <= 260


def test_a_scale_that_is_around_zero_has_two_sides():
    scale = scale_of([[[-2.0, 1.0], [None]]])
    assert (scale.low, scale.high, scale.around) == (-2, 2, True)
    assert (scale.step(-2), scale.step(0), scale.step(2), scale.step(99)) == ("d0", "d4", "d8", "d8")
    assert scale_of([[[0.5, 2.0]]]) == Scale(0.0, 2.0)
    assert scale_of([[[-2.0, -1.0]]]) == Scale(-2.0, 0.0)
    assert scale_of([[[0.0]]]).step(0.0) == "q8"


def test_a_heat_map_tells_every_value_while_they_are_few():
    made = heat_map("c", [[0.25, None]], ["3"], ["0", "1"], Scale(0, 1), told=("layer ", "head "))
    assert "layer 3, head 0: 0.25" in made
    assert "layer 3, head 1: nothing" in made
    big = heat_map(
        "c", [[0.5] * 60] * 60, [str(i) for i in range(60)], [str(i) for i in range(60)], Scale(0, 1)
    )
    assert big.count("<rect") == 0
    assert big.count("h9v9h-9z") == 3600


def test_a_strip_has_a_cell_for_each_original_id():
    made = strips("c", [Strip("encoder 1", (0, 1, 5), 8)])
    gone, kept = re.findall(r'<path d="([^"]*)" class="(gone|kept)"', made)
    assert (gone[1], gone[0].count("M")) == ("gone", 5)
    assert (kept[1], kept[0].count("M")) == ("kept", 3)
    assert "3 of 8" in made
    assert strips("c", [Strip("x", tuple(range(1000)), 2000)]).count("M") < 10


def test_leaves_are_ordered_so_that_branches_do_not_cross():
    assert leaf_order(4, [(0, 2, 1.0, 2), (1, 3, 2.0, 2), (4, 5, 3.0, 4)]) == [0, 2, 1, 3]
    assert "joined at 1.000" in dendrogram("c", ["a", "b"], [(0, 1, 1.0, 2)])


def test_leaves_have_the_colours_of_their_families():
    linkage = [(0, 2, 1.0, 2), (1, 3, 2.0, 3)]
    families = {"x": "Uralic", "c": "Slavic", "a": "Romance", "b": "Slavic"}
    drawn = dendrogram("c", ["a", "b", "c"], linkage, families)
    tree, key = drawn.split('<ul class="key">')
    marks = re.findall(r'class="(s\d)"><title>(\w+)</title>', tree)
    assert marks == [("s2", "Romance"), ("s1", "Slavic"), ("s1", "Slavic")]
    assert [name for name in ("Uralic", "Slavic", "Romance") if name in key] == ["Slavic", "Romance"]
    assert re.findall(r'class="(s\d)"', key) == ["s1", "s2"]
    assert "<ul" not in dendrogram("c", ["a", "b", "c"], linkage)
    assert "<ul" not in dendrogram("c", ["a", "b", "c"], linkage, {"x": "Uralic"})


def test_a_long_chain_needs_no_recursion():
    names = [str(i) for i in range(3000)]
    chain = [(i + 1, 0 if i == 0 else 3000 + i - 1, float(i), i + 2) for i in range(2999)]
    assert sorted(leaf_order(3000, chain)) == list(range(3000))
    node = Node("last", "step", True)
    for _ in range(3000):
        node = Node("inner", "step", False, [node])
    assert lineage("c", [node]).count("<circle") == 3001
    assert dendrogram("c", names, chain).count("joined at") == 2999
