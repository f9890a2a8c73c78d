"""Tables read in slices, their truncated SVD against numpy's dense one, and the whole fit of small ones."""

from dataclasses import replace
from itertools import cycle

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from numpy.typing import NDArray

from prunecli.methods.embeddings import fit as fit_module
from prunecli.methods.embeddings import table
from prunecli.methods.embeddings.fit import (
    DefineFit,
    batches,
    fit_define,
    fit_output,
    initialise,
    refine_reduction,
)
from prunecli.methods.embeddings.table import COSINE_WEIGHT, Table, moments, projective, row_weights
from prunecli.model.define import UNIT_KINDS, UnitShape
from prunecli.modules.define import DefineEmbedding
from prunecli.results.rewriting import TableQuality
from tests.modules.test_define import shapes


def bent_table(rows: int = 300, width: int = 24) -> NDArray[np.float32]:
    """Rows on a bent surface of 6 dimensions, with some noise and an offset."""
    rng = np.random.default_rng(0)
    inner = rng.standard_normal((rows, 6)) @ rng.standard_normal((6, width))
    noise = 0.05 * rng.standard_normal((rows, width))
    return (np.tanh(inner) @ rng.standard_normal((width, width)) + noise + 0.5).astype(np.float32)


def truncated_svd(
    array: NDArray[np.float32], map_dim: int, weights: NDArray[np.float32] | None = None
) -> NDArray[np.float64]:
    """The best reconstruction of rank n and an offset, by numpy's dense SVD of the weighted, centred rows."""
    own = np.ones(len(array)) if weights is None else weights.astype(np.float64)
    mean = np.average(array, axis=0, weights=own)
    root = np.sqrt(own)[:, None]
    _, _, right = np.linalg.svd((array - mean) * root, full_matrices=False)
    directions = right[:map_dim]
    return (array - mean) @ directions.T @ directions + mean


def table_of(array: NDArray[np.generic], counts: NDArray[np.integer] | None = None) -> Table:
    """An array `[V, m]` as a table; without counts every row weighs the same."""
    weights = row_weights(len(array), counts)
    return Table(*array.shape, lambda start, stop: array[start:stop], "The embedding table", weights=weights)


def start_of(array: NDArray[np.float32], map_dim: int, parts: int = 1):
    """The projective embedding of a table, every row weighing the same."""
    return projective(*moments(table_of(array)), map_dim, parts)


def test_chunks_cover_the_table_in_float32(monkeypatch):
    monkeypatch.setattr(table, "CHUNK_ROWS", 3)
    array = np.arange(14).reshape(7, 2).astype(ml_dtypes.bfloat16)
    found = list(table_of(array).chunks())
    assert [(start, stop) for start, stop, _ in found] == [(0, 3), (3, 6), (6, 7)]
    rows = np.concatenate([rows for _, _, rows in found])
    assert rows.dtype == np.float32
    np.testing.assert_array_equal(rows, np.arange(14).reshape(7, 2))


def test_weights_follow_the_counts():
    # (8 + 1)^0.5, (0 + 1)^0.5, (3 + 1)^0.5 = 3, 1, 2: their mean is 2.
    np.testing.assert_allclose(row_weights(3, np.array([8, 0, 3])), [1.5, 0.5, 1])
    np.testing.assert_array_equal(row_weights(3), [1, 1, 1])


def test_moments_are_those_of_numpy():
    array = bent_table(5000, 6)  # more rows than a chunk holds
    weights = row_weights(5000, np.arange(5000))
    mean, covariance = moments(table_of(array, counts=np.arange(5000)))
    np.testing.assert_allclose(mean, np.average(array, axis=0, weights=weights), rtol=1e-5)
    np.testing.assert_allclose(covariance, np.cov(array.T, aweights=weights, ddof=0), rtol=1e-4, atol=1e-5)


# The whole fit: never below the projective embedding, better with training, the same every time.


SHAPE = UnitShape(300, 8, 24, 48, 3, 4)


def quality_of(array: np.ndarray, other: np.ndarray, weights: np.ndarray) -> TableQuality:
    """Explained variance and mean cosine of the rows."""
    missing, spread = (
        weights @ np.square(array - rows).sum(axis=1)
        for rows in (other, np.average(array, axis=0, weights=weights))
    )
    norms = np.linalg.norm(array, axis=1) * np.linalg.norm(other, axis=1)
    cosine = np.average((array * other).sum(axis=1) / np.maximum(norms, 1e-8), weights=weights)
    error = missing / spread + COSINE_WEIGHT * (1 - cosine)
    return TableQuality(explained_variance=1 - missing / spread, mean_cosine=cosine, error=error)


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    monkeypatch.setattr(fit_module, "BATCH_ROWS", 64)


def fit(array: np.ndarray, shape: UnitShape = SHAPE, epochs: int = 4, **more) -> DefineFit:
    return fit_define(table_of(array), shape, epochs=epochs, **more)


def same(found: TableQuality, expected: TableQuality) -> None:
    assert vars(found) == pytest.approx(vars(expected), abs=1e-4)


@pytest.mark.parametrize("kind", ["define", "hgt-residual", "projective", "group-linear-shuffle", "linear"])
def test_starts_no_worse_than_projective_and_improves(kind):
    array = bent_table()
    found = fit(array, replace(SHAPE, kind=kind), 15)
    assert found.start.explained_variance >= found.baseline.explained_variance - 1e-5
    assert found.quality.error <= found.start.error
    if kind != "projective":
        missing = [1 - part.explained_variance for part in (found.baseline, found.start, found.quality)]
        assert missing[1] < 0.95 * missing[0]
        assert missing[2] < 0.95 * missing[1]
    assert not found.unit.map.weight.is_sparse


EXPANDING = [kind for kind in UNIT_KINDS if kind != "projective"]


@pytest.mark.parametrize(("kind", "shared"), zip(EXPANDING, cycle([False, True])))
def test_a_last_layer_that_ends_is_fitted_too(kind, shared):
    array = bent_table()
    expand_dim = 48 if kind == "hgt-residual" else 24
    shape = UnitShape(300, 8, 24, expand_dim, 3, 4, kind, shared, reduction=False)
    found = fit(array, shape, 15)
    if shape.groups[-1] == 1:
        assert found.start.explained_variance >= found.baseline.explained_variance - 1e-5
    assert found.start.explained_variance > 0
    assert found.quality.error < found.start.error
    assert found.parameters_after == sum(value.numel() for value in found.unit.parameters())


def test_qualities_are_those_of_the_rows():
    array, counts = bent_table(), np.arange(300) ** 2
    found = fit(array, counts=counts)
    weights = row_weights(300, counts).astype(np.float64)
    unit_rows = torch.cat(list(found.unit.expanded())).numpy()
    same(found.quality, quality_of(array, unit_rows, weights))
    same(found.baseline, quality_of(array, truncated_svd(array, 8, weights), weights))


def test_a_fit_that_fails_goes_back_to_its_start(monkeypatch):
    monkeypatch.setattr(fit_module, "LEARNING_RATE", 50.0)
    monkeypatch.setattr(fit_module, "MAP_LEARNING_RATE", 50.0)
    array = bent_table()
    wild = fit(array)
    assert wild.quality == wild.start
    untrained = fit(array, epochs=0)
    assert untrained.errors == ()
    for name, value in untrained.unit.state_dict().items():
        assert torch.equal(value, wild.unit.state_dict()[name])


def test_the_padding_row_stays_zero_and_counts_for_nothing():
    array = bent_table()
    array[1] = 0
    found = fit(array, padding_idx=1)
    assert not found.unit.rows(0, 2)[1].any()
    without = np.delete(array, 1, axis=0)
    rows = np.delete(torch.cat(list(found.unit.expanded())).numpy(), 1, axis=0)
    same(found.quality, quality_of(without, rows, np.ones(299)))


def test_a_tied_output_keeps_its_share_of_the_table():
    array = bent_table()
    tied = fit(array, tied_output=True)
    alone = fit(array).unit.map.weight.detach().numpy()
    loose = fit_output(table_of(array), alone)
    assert tied.baseline.explained_variance + 1e-6 >= tied.output.quality.explained_variance
    assert tied.output.quality.explained_variance > loose.quality.explained_variance
    assert fit(array, epochs=0).output is None


def test_the_reduction_is_the_best_for_its_features():
    array = bent_table()
    unit = fit(array).unit
    refine_reduction(unit, table_of(array))
    with torch.no_grad():
        *_, expanded, _ = unit.stages(unit.map.weight)
        features = np.concatenate([expanded.numpy(), np.ones((300, 1))], axis=1)
    solution, *_ = np.linalg.lstsq(features, array, rcond=None)
    least = ((array - features @ solution) ** 2).sum()
    assert ((array - unit.rows(0, 300).numpy()) ** 2).sum() == pytest.approx(least, rel=0.02)


def test_batches_cover_the_table_once_in_another_order_each_time():
    array = np.arange(600, dtype=np.float32).reshape(300, 2)
    orders = []
    for epoch in range(2):
        found = list(batches(table_of(array), 0, epoch))
        assert max(len(numbers) for numbers, _ in found) <= 64
        numbers = torch.cat([numbers for numbers, _ in found])
        assert sorted(numbers.tolist()) == list(range(300))
        np.testing.assert_array_equal(torch.cat([rows for _, rows in found]), array[numbers])
        orders.append(numbers.tolist())
    assert orders[0] != orders[1]


def test_it_never_reads_more_than_slices():
    array, longest = bent_table(9000, 6), 0

    def read(start, stop):
        nonlocal longest
        longest = max(longest, stop - start)
        return array[start:stop]

    fit_define(Table(9000, 6, read), UnitShape(9000, 2, 6, 8, 2, 2), epochs=1)
    assert longest <= 4096


def test_a_table_of_equal_rows_is_fitted():
    found = fit(np.full((300, 24), 2.0, np.float32), epochs=1)
    np.testing.assert_allclose(found.unit.rows(0, 300), 2, atol=1e-3)


def test_the_projection_for_a_tied_output_solves_weighted_least_squares():
    array, rng = bent_table(), np.random.default_rng(0)
    mapped = (array[:, :5] ** 2 + rng.standard_normal((300, 5))).astype(np.float32)
    weights = row_weights(300, np.arange(300))
    found = fit_output(table_of(array, counts=np.arange(300)), mapped)
    root = np.sqrt(weights.astype(np.float64))[:, None]
    inputs = np.concatenate([mapped, np.ones((300, 1))], axis=1)
    solution, *_ = np.linalg.lstsq(inputs * root, array * root, rcond=None)
    np.testing.assert_allclose(found.projection, solution[:5].T, rtol=1e-3, atol=1e-4)
    missing = weights @ ((array - inputs @ solution) ** 2).sum(axis=1)
    mean = np.average(array, axis=0, weights=weights)
    whole = weights @ ((array - mean) ** 2).sum(axis=1)
    assert found.quality.explained_variance == pytest.approx(1 - missing / whole, abs=1e-5)


def test_columns_without_variance_are_not_used():
    array = bent_table()
    mapped = start_of(array, 4).mapped(array)
    mapped[:, 2] = 0
    found = fit_output(table_of(array), mapped)
    np.testing.assert_allclose(found.projection[:, 2], 0, atol=1e-6)


# The initial weights make the unit the best projective embedding of the same n.


@settings(max_examples=40)
@given(shapes())
def test_starts_as_the_truncated_svd_whatever_the_shape(shape):
    array = bent_table(shape.vocabulary, shape.model_dim)
    found = start_of(array, shape.map_dim, shape.groups[0] if shape.groups else 1)
    unit = DefineEmbedding(shape)
    mapped = found.mapped(array)
    with torch.no_grad():
        unit.map.weight.copy_(torch.from_numpy(mapped))
    initialise(unit, found, mapped.min(axis=0), 0)
    is_shuffled = shape.kind == "group-linear-shuffle" and shape.shared_blocks
    is_grouped = shape.groups[-1] > 1 and (shape.kind == "hgt-no-mixing" or not shape.reduction)
    if not is_shuffled and not is_grouped:
        expected = truncated_svd(array, shape.map_dim)
        np.testing.assert_allclose(unit.rows(0, shape.vocabulary), expected, atol=1e-3)
