from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prunecli.evaluation.scoring import mcnemar_test, paired_t_test


def test_t_test_of_a_textbook_sample():
    # Student's own sleep data (Biometrika, 1908): t = 4.0621, p = 0.002833.
    first = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
    second = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
    assert paired_t_test(first, second) == pytest.approx(0.002833, abs=1e-6)
    assert paired_t_test(second, first) == pytest.approx(0.002833, abs=1e-6)


def test_t_test_without_variance():
    assert paired_t_test([1.0, 2.0], [1.0, 2.0]) == 1
    assert paired_t_test([1.0, 2.0], [2.0, 3.0]) == 0
    assert paired_t_test([1.0], [2.0]) is None
    assert paired_t_test([], []) is None


@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=10))
def test_mcnemar_counts_all_outcomes(pairs):
    """Of the 2^n ways in which n examples could have fallen to the models, those at least as uneven."""
    differing = [a for a, b in pairs if a != b]
    distance = abs(sum(differing) - len(differing) / 2)
    outcomes = list(product((0, 1), repeat=len(differing)))
    uneven = sum(abs(sum(outcome) - len(differing) / 2) >= distance for outcome in outcomes)
    first, second = [a for a, _ in pairs], [b for _, b in pairs]
    assert mcnemar_test(first, second) == pytest.approx(uneven / len(outcomes))
