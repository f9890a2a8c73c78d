"""The projection for a tied output layer against numpy's least squares."""

from __future__ import annotations

import numpy as np
import pytest

from prunecli.methods.embeddings.output import fit_output
from prunecli.methods.embeddings.table import Table, row_weights
from tests.methods.embeddings.tables import bent_table, start_of


def test_solves_weighted_least_squares() -> None:
    array, rng = bent_table(), np.random.default_rng(0)
    mapped = (array[:, :5] ** 2 + rng.standard_normal((300, 5))).astype(np.float32)
    weights = row_weights(300, np.arange(300))
    found = fit_output(Table.of(array), mapped, weights)
    root = np.sqrt(weights.astype(np.float64))[:, None]
    inputs = np.concatenate([mapped, np.ones((300, 1))], axis=1)
    solution, *_ = np.linalg.lstsq(inputs * root, array * root, rcond=None)
    np.testing.assert_allclose(found.projection, solution[:5].T, rtol=1e-3, atol=1e-4)
    missing = weights @ ((array - inputs @ solution) ** 2).sum(axis=1)
    mean = np.average(array, axis=0, weights=weights)
    whole = weights @ ((array - mean) ** 2).sum(axis=1)
    assert found.explained_variance == pytest.approx(1 - missing / whole, abs=1e-5)


def test_columns_without_variance_are_not_used() -> None:
    array = bent_table()
    mapped = start_of(array, 4).mapped(array)
    mapped[:, 2] = 0
    found = fit_output(Table.of(array), mapped, row_weights(300))
    np.testing.assert_allclose(found.projection[:, 2], 0, atol=1e-6)
