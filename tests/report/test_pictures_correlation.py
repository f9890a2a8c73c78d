"""Correlation maps by hand, in slices, and as a picture."""

import numpy as np
import pytest

from prunecli.errors import CheckpointError
from prunecli.report.pictures import correlation_map, group_correlations, mean_correlation


def test_by_hand():
    # Columns (3, 4), (6, 8), (-4, 3), (0, 1): cosines 1, 0, 4/5, 3/5.
    table = np.array([[3, 6, -4, 0], [4, 8, 3, 1]], np.float16)
    expected = [[1, 1, 0, 0.8], [1, 1, 0, 0.8], [0, 0, 1, 0.6], [0.8, 0.8, 0.6, 1]]
    found = correlation_map([table])
    np.testing.assert_allclose(found, expected, atol=1e-12)
    assert mean_correlation(found) == pytest.approx(2 * (1 + 0.8 + 0.8 + 0.6) / 12)


def test_values_that_are_not_finite_are_refused():
    with pytest.raises(CheckpointError, match="not finite"):
        correlation_map([np.array([[1.0, np.nan]])])


def test_groups_are_means_of_their_dimensions():
    found = correlation_map([np.random.default_rng(1).standard_normal((20, 6))])
    groups = group_correlations(found, 3)
    for first in range(3):
        for second in range(3):
            pairs = [
                found[i, j]
                for i in (2 * first, 2 * first + 1)
                for j in (2 * second, 2 * second + 1)
                if i != j
            ]
            assert groups[first, second] == pytest.approx(sum(pairs) / len(pairs))
