"""Linear centred kernel alignment of representations (2309.01826, section 2.3; Kornblith et al., 1905.00414)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from prunecli.analysis.representations import Features

BLOCK_BYTES = 128 << 20
"""Memory for the blocks of Gram matrices."""
CONSTANT = 1e-12
"""Features whose centred part is a smaller share of their square norm than this are the same for every sentence."""


def linear_cka(features: Sequence[Features], *, block_bytes: int = BLOCK_BYTES) -> NDArray[np.float64]:
    """CKA(X, Y) = ||Y^T X||_F^2 / (||X^T X||_F ||Y^T Y||_F) of centred X, Y, for every pair of components.

    2.3 prints ||A B^T||_F^2 above the line, which does not go with its n x d matrices; this is Kornblith's quotient,
    computed as <K, L>_F / (||K||_F ||L||_F) with the Gram matrices K = X X^T and L = Y Y^T, which is the same number:
    for m components that takes m n^2 d + m^2 n^2 operations in the place of m^2 n d^2. The Gram matrices `[n, n]` are
    made and used a block of rows at a time, of which only the part right of the diagonal: memory is twice `block_bytes`
    and a float64 copy of one component, whatever the number of tokens or components.

    Args:
        features: m times `[n, d]`, row i of each for sentence i; the widths d may differ.
        block_bytes: less takes less memory; the result stays the same but for rounding.

    Returns:
        `[m, m]` float64, symmetric, in [0, 1]; NaN in the rows and columns of features that are the same for every
        sentence, which no measure tells apart.
    """
    count, sentences = len(features), len(features[0])
    means = [array.mean(axis=0, dtype=np.float64) for array in features]
    products = np.zeros((count, count))
    rows = min(sentences, max(1, block_bytes // (8 * count * sentences)))
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
    similarity: NDArray[np.float64] = np.clip(products / np.outer(norms, norms), 0, 1)
    np.fill_diagonal(similarity, np.where(np.isnan(norms), np.nan, 1.0))
    return similarity


def constant(features: Sequence[Features]) -> NDArray[np.bool_]:
    """`[m]`: which of the features are the same for every sentence, but for rounding."""
    found = []
    for array in features:
        wide = array.astype(np.float64)
        whole = float(np.square(wide).sum())
        wide -= wide.mean(axis=0)
        found.append(float(np.square(wide).sum()) <= CONSTANT * whole)
    return np.array(found, dtype=np.bool_)
