"""Small tables for the tests of the DeFINE fit."""

import numpy as np
from numpy.typing import NDArray

from prunecli.methods.embeddings.table import Table, moments, projective, row_weights


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
    found: NDArray[np.float64] = (array - mean) @ directions.T @ directions + mean
    return found


def table_of(
    array: NDArray[np.generic], name: str = "The embedding table", counts: NDArray[np.integer] | None = None
) -> Table:
    """An array or a memory map `[V, m]` as a table; without counts every row weighs the same."""
    weights = row_weights(len(array), counts)
    return Table(*array.shape, lambda start, stop: array[start:stop], name, weights=weights)


def start_of(array: NDArray[np.float32], map_dim: int, parts: int = 1):
    """The projective embedding of a table, every row weighing the same."""
    return projective(moments(table_of(array)), map_dim, parts)
