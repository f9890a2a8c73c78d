"""The best projective embedding of a table: its truncated weighted SVD, exact and streaming."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prunecli.errors import UsageError
from prunecli.methods.embeddings.table import Array, Table
from prunecli.progress import Progress, silent

Double = NDArray[np.float64]
SMALLEST = 1e-12
"""Directions with less than this part of the largest variance are not stretched to variance 1."""


@dataclass(frozen=True)
class Moments:
    """Weighted mean and covariance of the rows.

    Attributes:
        mean: [m].
        covariance: [m, m]: sum of w (e - mean)(e - mean)^T over the sum of w.
    """

    mean: Double
    covariance: Double

    @property
    def variance(self) -> float:
        """Mean squared distance of the rows from their mean; 1 for a table of equal rows."""
        found = float(np.trace(self.covariance))
        return found if found > 0 else 1.0


@dataclass(frozen=True)
class Projective:
    """e -> mean + x (scales * basis)^T with x = (e - mean) basis / scales: rank n and an offset.

    No projective embedding of the same n has a smaller weighted squared error (Eckart and Young). The columns of x
    have mean 0 and variance 1, so that every column of the map table matters alike to what reads it.

    Attributes:
        mean: [m].
        basis: [m, n], orthonormal columns.
        scales: [n], the standard deviation of each direction.
    """

    mean: Double
    basis: Double
    scales: Double

    def mapped(self, rows: Array) -> Array:
        """[rows, m] -> x [rows, n]."""
        return np.asarray((rows - self.mean) @ (self.basis / self.scales), np.float32)

    def expanded(self, mapped: Array) -> Tensor:
        """x [rows, n] -> rows [rows, m], in float32."""
        expansion, mean = (torch.from_numpy(part.astype(np.float32)) for part in (self.expansion, self.mean))
        return torch.from_numpy(mapped) @ expansion + mean

    @property
    def expansion(self) -> Double:
        """From x to rows without their mean: [n, m]."""
        return np.asarray((self.basis * self.scales).T)


def moments(table: Table, weights: Array, progress: Progress = silent) -> Moments:
    """One pass over the table, summed in float64: exact up to rounding, and m x m values of memory.

    Raises:
        CheckpointError: a value of the table is not finite.
    """
    width = table.model_dim
    total = float(weights.sum(dtype=np.float64))
    weighted_sum, products = np.zeros(width), np.zeros((width, width))
    with progress("measuring the table", table.vocabulary, "rows") as advance:
        for start, stop, rows in table.chunks():
            scaled = rows * np.sqrt(weights[start:stop, None], dtype=np.float64)
            weighted_sum += weights[start:stop].astype(np.float64) @ rows
            products += scaled.T @ scaled
            advance(stop - start)
    mean = weighted_sum / total
    return Moments(mean, products / total - np.outer(mean, mean))


def projective(found: Moments, map_dim: int, parts: int = 1) -> Projective:
    """The `map_dim` directions of largest variance.

    Args:
        found: moments of the table.
        map_dim: n.
        parts: the directions are dealt out to this many equal parts of x in turn, so that each group of the first
            expansion layer reads strong and weak ones.

    Raises:
        UsageError: n is above m, or not a multiple of `parts`.
    """
    if not 0 < map_dim <= len(found.mean) or map_dim % parts:
        raise UsageError(
            f"A map dimension of {map_dim} does not fit a table of width {len(found.mean)} and {parts} parts"
        )
    values, vectors = np.linalg.eigh(found.covariance)
    order = np.argsort(values)[::-1][:map_dim].reshape(-1, parts).T.ravel()
    largest = max(float(values[-1]), 0.0)
    scales = np.where(values[order] > SMALLEST * largest, np.sqrt(np.maximum(values[order], 0)), 0.0)
    scales[scales == 0] = np.sqrt(largest) if largest else 1.0
    basis = vectors[:, order]
    # Eigenvectors have no sign; the largest entry is made positive, so that every machine finds the same ones.
    signs = np.sign(basis[np.abs(basis).argmax(axis=0), np.arange(map_dim)])
    return Projective(found.mean, basis * signs, scales)
