"""The output layer that reads the map table: logits h E^T as (h P) U^T.

Adding one vector to every row of E adds the same number to all logits of a position, which no softmax sees. So P is
the best projection of the rows without their mean: U P^T is as near to E as it can be up to that one vector.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prunecli.methods.embeddings.table import Array, Table
from prunecli.progress import Progress, silent

SMALLEST = 1e-10
"""Directions of the map table below this part of its largest variance are not used."""


@dataclass(frozen=True)
class OutputFit:
    """The projection of hidden states for a given map table.

    Attributes:
        projection: P [m, n]; `DefineOutput.project.weight` is its transpose.
        explained_variance: 1 - sum of w |e - mean - P (u - mean)|^2 over sum of w |e - mean|^2.
    """

    projection: NDArray[np.float32]
    explained_variance: float


def fit_output(table: Table, mapped: Array, weights: Array, progress: Progress = silent) -> OutputFit:
    """Weighted least squares for P in E = U P^T + a constant row, from one pass over both tables, in float64.

    Args:
        table: E.
        mapped: U [V, n].
        weights: of the rows [V].
        progress: told of the rows.

    Raises:
        CheckpointError: a value of E is not finite.
    """
    map_dim = mapped.shape[1]
    width = map_dim + table.model_dim
    products, sums = np.zeros((map_dim, width)), np.zeros(width)
    squares = np.zeros(table.model_dim)
    with progress("solving for the output projection", table.vocabulary, "rows") as advance:
        for start, stop, rows in table.chunks():
            both = np.concatenate([mapped[start:stop], rows], axis=1, dtype=np.float64)
            weighted = both * weights[start:stop, None]
            products += weighted[:, :map_dim].T @ both
            squares += (weighted[:, map_dim:] * rows).sum(axis=0)
            sums += weighted.sum(axis=0)
            advance(stop - start)
    total = float(weights.sum(dtype=np.float64))
    mean = sums / total
    products = products / total - np.outer(mean[:map_dim], mean)
    variance = float((squares / total - mean[map_dim:] ** 2).sum())
    own, across = products[:, :map_dim], products[:, map_dim:]
    projection = np.linalg.pinv(own, rcond=SMALLEST, hermitian=True) @ across
    explained = float((2 * projection * across).sum() - ((own @ projection) * projection).sum())
    return OutputFit(projection.T.astype(np.float32), explained / variance if variance > 0 else 1.0)
