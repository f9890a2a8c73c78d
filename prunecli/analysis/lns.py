"""Local neighbourhood similarity of representations (2309.01826, section 2.3; Boggust et al., 2022)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from prunecli.analysis.cka import BLOCK_BYTES, constant
from prunecli.analysis.representations import Features
from prunecli.errors import UsageError

GRID = 2.0**40
"""Cosines that agree to 1 / GRID are equal: the last digits depend on the order of additions."""


def neighbour_count(share: float, sentences: int) -> int:
    """k for a share of the sentences (5 % in the paper), to the nearest whole number.

    Raises:
        UsageError: k is 0, or there are not so many other sentences.
    """
    k = round(share * sentences)
    if not 1 <= k <= sentences - 1:
        raise UsageError(
            f"`neighbours={share:g}` of {sentences:,} sentences: {k} neighbours",
            f"Choose a share that makes 1 to {sentences - 1:,} of them, or give more sentences.",
        )
    return k


def local_neighbourhood_similarity(
    features: Sequence[Features], k: int, *, block_bytes: int = BLOCK_BYTES
) -> NDArray[np.float64]:
    """LNS = mean over sentences s of Jaccard(k-NN_1(s), k-NN_2(s)), for every pair of components.

    Neighbours are the k other sentences of the highest cosine; of equal ones the first. Exact: all n^2 cosines of a
    component are looked at, a block of rows at a time. Memory is `block_bytes`, a float64 copy of one component, and
    m n^2 / 8 bytes for who is whose neighbour: 0.3 GB for 96 components and 5,000 sentences.

    Args:
        features: m times `[n, d]`, row i of each for sentence i; the widths d may differ.
        k: 1 to n - 1.
        block_bytes: less takes less memory; the result stays the same but for rounding.

    Returns:
        `[m, m]` float64, symmetric, in [0, 1]; NaN in the rows and columns of features that are the same for every
        sentence, whose neighbours mean nothing.
    """
    count, sentences = len(features), len(features[0])
    nearest = np.stack([_nearest(array, k, block_bytes) for array in features], axis=1)
    total = np.zeros((count, count))
    rows = max(1, block_bytes // (4 * count * sentences))
    for start in range(0, sentences, rows):
        member = np.unpackbits(nearest[start : start + rows], axis=2, count=sentences).astype(np.float32)
        both = np.matmul(member, member.transpose(0, 2, 1)).astype(np.float64)
        total += (both / (2 * k - both)).sum(axis=0)
    similarity = total / sentences
    same = constant(features)
    similarity[same, :] = np.nan
    similarity[:, same] = np.nan
    return similarity


def _nearest(array: Features, k: int, block_bytes: int) -> NDArray[np.uint8]:
    """`[n, ceil(n / 8)]`: which sentences are the k nearest of each, as packed bits."""
    wide = array.astype(np.float64)
    norms = np.linalg.norm(wide, axis=1, keepdims=True)
    wide /= np.where(norms > 0, norms, 1)
    sentences = len(wide)
    rows = max(1, block_bytes // (24 * sentences))
    found = []
    for start in range(0, sentences, rows):
        cosines = wide[start : start + rows] @ wide.T
        np.rint(cosines * GRID, out=cosines)
        own = np.arange(len(cosines))
        cosines[own, start + own] = -np.inf  # a sentence is no neighbour of itself
        found.append(np.packbits(_largest(cosines, k), axis=1))
    return np.concatenate(found)


def _largest(values: NDArray[np.float64], k: int) -> NDArray[np.bool_]:
    """Mask of the k largest values of each row; the first of equal values."""
    last = np.partition(values, -k, axis=1)[:, -k, None]
    chosen: NDArray[np.bool_] = values >= last
    surplus = chosen.sum(axis=1) - k
    for row in np.flatnonzero(surplus):
        tied = np.flatnonzero(values[row] == last[row])
        chosen[row, tied[len(tied) - surplus[row] :]] = False
    return chosen
