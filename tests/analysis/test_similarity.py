"""prunecli.analysis.similarity against sets counted by hand and by the slow restatement."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from prunecli.analysis.similarity import jaccard, jaccard_matrix, spread_by_relation, two_triangles
from tests.reference import jaccard as reference

sets = st.sets(st.tuples(st.sampled_from(["a", "b"]), st.integers(0, 7)))


@given(sets, sets)
def test_jaccard_is_members_of_both_over_members_of_either(first, second):
    assert jaccard(first, second) == reference.jaccard(first, second)


@given(st.lists(sets, max_size=5))
def test_matrix_is_symmetric_with_ones_on_the_diagonal(selections):
    matrix = jaccard_matrix(selections)
    assert matrix.shape == (len(selections), len(selections))
    np.testing.assert_array_equal(matrix, matrix.T)
    np.testing.assert_array_equal(np.diag(matrix), 1)
    for row, first in enumerate(selections):
        for column, second in enumerate(selections):
            assert matrix[row, column] == reference.jaccard(first, second)


def test_pairs_are_grouped_by_what_they_share():
    pairs = [("a", "b"), ("a", "c"), ("d", "b"), ("d", "c")]
    # Same source: ab-ac, db-dc. Same target: ab-db, ac-dc. Neither: ab-dc, ac-db.
    matrix = np.array([[1, 0.1, 0.2, 0.3], [0.1, 1, 0.4, 0.5], [0.2, 0.4, 1, 0.6], [0.3, 0.5, 0.6, 1]])
    found = spread_by_relation(pairs, matrix)
    assert {name: spread.comparisons for name, spread in found.items()} == {
        "same source": 2,
        "same target": 2,
        "neither": 2,
    }
    assert math.isclose(found["same source"].mean, 0.35)
    assert (found["same source"].lowest, found["same source"].highest) == (0.1, 0.6)
    assert math.isclose(found["same target"].mean, 0.35)
    assert (found["same target"].lowest, found["same target"].highest) == (0.2, 0.5)
    assert math.isclose(found["neither"].mean, 0.35)


def test_a_group_without_comparisons_has_no_mean():
    assert math.isnan(spread_by_relation([("a", "b")], np.eye(1))["same source"].mean)


def test_lower_triangle_is_the_encoder_and_upper_the_decoder():
    joined = two_triangles(np.full((3, 3), 0.25), np.full((3, 3), 0.75))
    assert np.isnan(np.diag(joined)).all()
    assert (joined[np.tril_indices(3, -1)] == 0.25).all()
    assert (joined[np.triu_indices(3, 1)] == 0.75).all()
