"""How alike representations are (2309.01826, section 2.3): linear CKA, and local neighbourhood similarity (LNS)."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from prunecli.errors import UsageError
from prunecli.model.decision import Bools, Floats

Features = NDArray[np.float32]
"""`[sentences, width]`: a row per sentence."""

BLOCK_BYTES = 128 << 20
"""Memory for the blocks of Gram matrices."""
CONSTANT = 1e-12
"""Features whose centred part is a smaller share of their square norm than this are the same for every sentence."""


def linear_cka(features: Sequence[Features]) -> Floats:
    """CKA(X, Y) = ||Y^T X||_F^2 / (||X^T X||_F ||Y^T Y||_F) of centred X, Y, for every pair of components.

    2.3 prints ||A B^T||_F^2 above the line, which does not go with its n x d matrices; this is Kornblith's quotient,
    computed as <K, L>_F / (||K||_F ||L||_F) with the Gram matrices K = X X^T and L = Y Y^T, which is the same number:
    for m components that takes m n^2 d + m^2 n^2 operations in the place of m^2 n d^2. The Gram matrices `[n, n]` are
    made and used a block of rows at a time, of which only the part right of the diagonal: memory is twice `BLOCK_BYTES`
    and a float64 copy of one component, whatever the number of tokens or components.

    Args:
        features: m times `[n, d]`, row i of each for sentence i; the widths d may differ.

    Returns:
        `[m, m]` float64, symmetric, in [0, 1]; NaN in the rows and columns of features that are the same for every
        sentence, which no measure tells apart.
    """
    count, sentences = len(features), len(features[0])
    means = [array.mean(axis=0, dtype=np.float64) for array in features]
    products = np.zeros((count, count))
    rows = min(sentences, max(1, BLOCK_BYTES // (8 * count * sentences)))
    for start in range(0, sentences, rows):
        end = min(start + rows, sentences)
        grams = np.empty((count, end - start, sentences - start))
        for place, (array, mean) in enumerate(zip(features, means, strict=True)):
            centred = array[start:] - mean
            np.matmul(centred[: end - start], centred.T, out=grams[place])
        square = grams[:, :, : end - start].reshape(count, -1)
        right = grams[:, :, end - start :].reshape(count, -1)
        products += square @ square.T + 2 * (right @ right.T)
    norms = np.sqrt(np.diagonal(products))
    norms[constant(features)] = np.nan
    similarity: Floats = np.clip(products / np.outer(norms, norms), 0, 1)
    np.fill_diagonal(similarity, np.where(np.isnan(norms), np.nan, 1.0))
    return similarity


def constant(features: Sequence[Features]) -> Bools:
    """`[m]`: which of the features are the same for every sentence, but for rounding."""
    found = []
    for array in features:
        wide = array.astype(np.float64)
        whole = float(np.square(wide).sum())
        wide -= wide.mean(axis=0)
        found.append(float(np.square(wide).sum()) <= CONSTANT * whole)
    return np.array(found, dtype=np.bool_)


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


def local_neighbourhood_similarity(features: Sequence[Features], k: int) -> Floats:
    """LNS = mean over sentences s of Jaccard(k-NN_1(s), k-NN_2(s)), for every pair of components.

    Neighbours are the k other sentences of the highest cosine; of equal ones the first. Exact: all n^2 cosines of a
    component are looked at, a block of rows at a time. Memory is `BLOCK_BYTES`, a float64 copy of one component, and
    m n^2 / 8 bytes for who is whose neighbour: 0.3 GB for 96 components and 5,000 sentences.

    Args:
        features: m times `[n, d]`, row i of each for sentence i; the widths d may differ.
        k: 1 to n - 1.

    Returns:
        `[m, m]` float64, symmetric, in [0, 1]; NaN in the rows and columns of features that are the same for every
        sentence, whose neighbours mean nothing.
    """
    count, sentences = len(features), len(features[0])
    nearest = np.stack([_nearest(array, k) for array in features], axis=1)
    total = np.zeros((count, count))
    rows = max(1, BLOCK_BYTES // (4 * count * sentences))
    for start in range(0, sentences, rows):
        member = np.unpackbits(nearest[start : start + rows], axis=2, count=sentences).astype(np.float32)
        both = np.matmul(member, member.transpose(0, 2, 1)).astype(np.float64)
        total += (both / (2 * k - both)).sum(axis=0)
    similarity = total / sentences
    same = constant(features)
    similarity[same, :] = np.nan
    similarity[:, same] = np.nan
    return similarity


def _nearest(array: Features, k: int) -> NDArray[np.uint8]:
    """`[n, ceil(n / 8)]`: which sentences are the k nearest of each, as packed bits."""
    wide = array.astype(np.float64)
    norms = np.linalg.norm(wide, axis=1, keepdims=True)
    wide /= np.where(norms > 0, norms, 1)
    sentences = len(wide)
    rows = max(1, BLOCK_BYTES // (40 * sentences))
    found = []
    for start in range(0, sentences, rows):
        cosines = wide[start : start + rows] @ wide.T
        ranks = np.rint(cosines * GRID).astype(np.int64) * sentences - np.arange(sentences)  # all different
        own = np.arange(len(ranks))
        ranks[own, start + own] = np.iinfo(np.int64).min  # a sentence is no neighbour of itself
        last = np.partition(ranks, -k, axis=1)[:, -k, None]
        found.append(np.packbits(ranks >= last, axis=1))
    return np.concatenate(found)
