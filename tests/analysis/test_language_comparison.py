"""What languages' experts have in common: against the slow restatement, sets counted and trees drawn by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prunecli.analysis.language_comparison import cluster, jaccard_matrix, spread_by_relation
from tests.reference import jaccard as reference

sets = st.sets(st.tuples(st.sampled_from(["a", "b"]), st.integers(0, 7)))
LINE = {"far": np.array([10.0]), "a": np.array([0.0]), "b": np.array([1.0]), "c": np.array([4.0])}


@given(st.lists(sets, max_size=5))
def test_matrix_is_symmetric_with_ones_on_the_diagonal(selections):
    members = [(name, number) for name in "ab" for number in range(8)]
    held = [[member in selection for member in members] for selection in selections]
    matrix = jaccard_matrix(np.array(held, bool).reshape(len(selections), len(members)))
    assert matrix.shape == (len(selections), len(selections))
    np.testing.assert_array_equal(matrix, matrix.T)
    np.testing.assert_array_equal(np.diag(matrix), 1)
    for row, first in enumerate(selections):
        for column, second in enumerate(selections):
            assert matrix[row, column] == reference.jaccard(first, second)


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("abc")), min_size=2, max_size=9, unique=True)
)
def test_spreads_against_every_two_pairs_one_by_one(pairs):
    matrix = np.random.default_rng(0).random((len(pairs), len(pairs)))
    found = spread_by_relation(pairs, matrix)
    for relation, values in reference.by_relation(pairs, matrix.tolist()).items():
        if values:
            expected = {"mean": sum(values) / len(values), "lowest": min(values), "highest": max(values)}
            expected["comparisons"] = len(values)
            assert found[relation].to_json() == pytest.approx(expected, abs=1e-6)
        else:
            assert found[relation] is None


def test_tree_of_four_points_on_a_line():
    # a and b join at 1, with c at mean(4, 3) = 3.5, with far at mean(10, 9, 6) = 8.333.
    found = cluster(LINE, "average")
    assert found is not None
    assert list(found.blocks(""))[1].splitlines() == [
        "8.333",
        "├─ 3.500",
        "│  ├─ 1.000",
        "│  │  ├─ a",
        "│  │  └─ b",
        "│  └─ c",
        "└─ far",
    ]
    assert found.clusters["members"][1] == "far"
    assert found.clusters["members"][0]["distance"] == pytest.approx(3.5)


def test_fewer_than_two_languages_have_no_tree():
    assert cluster({"a": LINE["a"]}) is None
