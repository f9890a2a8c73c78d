"""Correlation maps of embedding dimensions (1911.12385, appendix B, Figures 4 and 7 to 11).

M = E^T E, normalised between 0 and 1: the identity where all dimensions are independent. The paper does not say how it
normalises; here |M_ij| is divided by sqrt(M_ii M_jj), the absolute cosine of the two columns. Columns are not centred.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from prunecli.errors import CheckpointError


def correlation_map(chunks: Iterable[NDArray[np.generic]]) -> NDArray[np.float64]:
    """The map [m, m] of a table that comes in slices of rows [rows, m]; one pass, summed in float64.

    A dimension that is 0 in every row is independent of all others: 0 beside the diagonal, 1 on it.

    Raises:
        CheckpointError: a value that is not finite.
    """
    products = np.zeros(())
    for chunk in chunks:
        rows = np.asarray(chunk).astype(np.float64)
        products = products + rows.T @ rows
    if not np.isfinite(products).all():
        raise CheckpointError(
            "The embedding table holds a value that is not finite", "Copy the checkpoint again."
        )
    lengths = np.sqrt(products.diagonal())
    lengths[lengths == 0] = 1
    found: NDArray[np.float64] = np.minimum(np.abs(products / np.outer(lengths, lengths)), 1)
    np.fill_diagonal(found, 1)
    return found


def mean_correlation(found: NDArray[np.float64]) -> float:
    """Mean of a map beside its diagonal: 0 where all dimensions are independent, 1 where all are the same."""
    size = len(found)
    return float((found.sum() - found.trace()) / (size * (size - 1))) if size > 1 else 0.0


def group_correlations(found: NDArray[np.float64], groups: int) -> NDArray[np.float64]:
    """Mean correlation of each two groups of a layer (Figure 11), of its map [k, k]: [groups, groups].

    On the diagonal that of a group's dimensions with each other, without themselves. Groups are equal parts, in order.
    """
    width = len(found) // groups
    blocks = found.reshape(groups, width, groups, width).mean(axis=(1, 3))
    parts = [slice(start, start + width) for start in range(0, len(found), width)]
    np.fill_diagonal(blocks, [mean_correlation(found[part, part]) for part in parts])
    return np.asarray(blocks, np.float64)
