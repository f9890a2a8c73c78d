"""AIMER of an expert by its definition: mean |w| over root mean square, of all its weights."""

from collections.abc import Iterable

import numpy as np


def aimer(tensors: Iterable[np.ndarray]) -> float:
    """(sum |w| / N) / sqrt(sum w^2 / N)."""
    values = np.concatenate([tensor.ravel() for tensor in tensors], dtype=np.float64)
    return float(np.abs(values).mean() / np.sqrt(np.square(values).mean()))
