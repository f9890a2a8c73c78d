"""Tables read in slices, and what their rows weigh; the streaming truncated SVD against numpy's dense one."""

import ml_dtypes
import numpy as np
import pytest

from prunecli.methods.embeddings import table
from prunecli.methods.embeddings.table import moments, projective, row_weights
from tests.methods.embeddings.tables import bent_table, start_of, table_of, truncated_svd


def test_chunks_cover_the_table_in_float32(monkeypatch):
    monkeypatch.setattr(table, "CHUNK_ROWS", 3)
    array = np.arange(14).reshape(7, 2).astype(ml_dtypes.bfloat16)
    found = list(table_of(array).chunks())
    assert [(start, stop) for start, stop, _ in found] == [(0, 3), (3, 6), (6, 7)]
    rows = np.concatenate([rows for _, _, rows in found])
    assert rows.dtype == np.float32
    np.testing.assert_array_equal(rows, np.arange(14).reshape(7, 2))


def test_memory_maps_are_left_unchanged(tmp_path):
    np.save(tmp_path / "table.npy", np.ones((5, 3), np.float32))
    table = table_of(np.load(tmp_path / "table.npy", mmap_mode="r"))
    rows = table.rows(1, 3)
    rows += 1
    np.testing.assert_array_equal(table.rows(0, 5), np.ones((5, 3)))


def test_weights_follow_the_counts():
    # (8 + 1)^0.5, (0 + 1)^0.5, (3 + 1)^0.5 = 3, 1, 2: their mean is 2.
    np.testing.assert_allclose(row_weights(3, np.array([8, 0, 3])), [1.5, 0.5, 1])
    np.testing.assert_array_equal(row_weights(3), [1, 1, 1])


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
