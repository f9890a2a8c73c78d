"""The streaming truncated SVD against numpy's dense one."""

from __future__ import annotations

import numpy as np
import pytest

from prunecli.methods.embeddings.table import moments, projective, row_weights
from tests.methods.embeddings.tables import bent_table, start_of, table_of, truncated_svd


def test_moments_are_those_of_numpy():
    array = bent_table(5000, 6)  # more rows than a chunk holds
    weights = row_weights(5000, np.arange(5000))
    found = moments(table_of(array, counts=np.arange(5000)))
    np.testing.assert_allclose(found.mean, np.average(array, axis=0, weights=weights), rtol=1e-5)
    np.testing.assert_allclose(
        found.covariance, np.cov(array.T, aweights=weights, ddof=0), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_reconstructs_as_the_dense_svd(parts):
    array = bent_table()
    weights = row_weights(len(array), np.arange(len(array)))
    found = projective(moments(table_of(array, counts=np.arange(len(array)))), 8, parts)
    reconstruction = found.mapped(array) @ found.expansion + found.mean
    np.testing.assert_allclose(reconstruction, truncated_svd(array, 8, weights), atol=1e-4)


def test_tables_of_low_rank_stay_finite():
    array = bent_table(50, 10) * 0 + 3
    found = start_of(array.astype(np.float32), 4)
    assert np.isfinite(found.expansion).all()
    np.testing.assert_allclose(found.mapped(array) @ found.expansion + found.mean, array)
