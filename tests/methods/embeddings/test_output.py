"""The projection for a tied output layer against numpy's least squares."""

from __future__ import annotations

import numpy as np
import pytest

from prunecli.errors import UsageError
from prunecli.methods.embeddings.output import fit_output
from prunecli.methods.embeddings.table import Table, row_weights
from tests.methods.embeddings.tables import bent_table, start_of, truncated_svd


def rows_of(mapped: np.ndarray):
    return lambda start, stop: mapped[start:stop]


def test_solves_weighted_least_squares() -> None:
    array, rng = bent_table(), np.random.default_rng(0)
    mapped = (array[:, :5] ** 2 + rng.standard_normal((300, 5))).astype(np.float32)
    weights = row_weights(300, np.arange(300))
    found = fit_output(Table.of(array), rows_of(mapped), 5, weights)
    root = np.sqrt(weights.astype(np.float64))[:, None]
    inputs = np.concatenate([mapped, np.ones((300, 1))], axis=1)
    solution, *_ = np.linalg.lstsq(inputs * root, array * root, rcond=None)
    np.testing.assert_allclose(found.projection, solution[:5].T, rtol=1e-3, atol=1e-4)
    missing = weights @ ((array - inputs @ solution) ** 2).sum(axis=1)
    mean = np.average(array, axis=0, weights=weights)
    whole = weights @ ((array - mean) ** 2).sum(axis=1)
    assert found.explained_variance == pytest.approx(1 - missing / whole, abs=1e-5)


def test_a_table_of_principal_directions_gives_the_truncated_svd() -> None:
    array = bent_table()
    mapped = start_of(array, 6).mapped(array)
    found = fit_output(Table.of(array), rows_of(mapped), 6, row_weights(300))
    expected = truncated_svd(array, 6) - array.mean(axis=0)
    np.testing.assert_allclose(mapped @ found.projection.T, expected, atol=1e-3)


def test_softmax_does_not_see_the_mean() -> None:
    # With n = m - 1 and rows in n dimensions around an offset, probabilities are those of the table itself.
    rng = np.random.default_rng(1)
    mapped = rng.standard_normal((40, 5))
    array = (mapped @ rng.standard_normal((5, 6)) + rng.standard_normal(6)).astype(np.float32)
    found = fit_output(Table.of(array), rows_of(mapped.astype(np.float32)), 5, row_weights(40))
    hidden = rng.standard_normal((3, 6))
    exact, fitted = hidden @ array.T, hidden @ found.projection @ mapped.T
    for logits in (exact, fitted):
        logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(fitted, exact, atol=1e-4)
    assert found.explained_variance == pytest.approx(1)


def test_columns_without_variance_are_not_used() -> None:
    array = bent_table()
    mapped = start_of(array, 4).mapped(array)
    mapped[:, 2] = 0
    found = fit_output(Table.of(array), rows_of(mapped), 4, row_weights(300))
    np.testing.assert_allclose(found.projection[:, 2], 0, atol=1e-6)


def test_a_map_table_of_another_width_is_refused() -> None:
    with pytest.raises(UsageError, match=r"shape \(5,\), not \(4,\)"):
        fit_output(Table.of(bent_table()), rows_of(np.zeros((300, 5), np.float32)), 4, row_weights(300))
