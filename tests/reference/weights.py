"""AIMER of an expert by its definition, one number at a time: mean |w| over root mean square, of all its weights."""

from collections.abc import Iterable
from math import fsum, sqrt

import numpy as np


def aimer(tensors: Iterable[np.ndarray]) -> float:
    """(sum |w| / N) / sqrt(sum w^2 / N)."""
    values = [float(value) for tensor in tensors for value in tensor.reshape(-1)]
    absolute = fsum(abs(value) for value in values) / len(values)
    return absolute / sqrt(fsum(value * value for value in values) / len(values))
