"""Sections 3.1 to 3.3 and A.1 to A.2 of 1911.12385, one group at a time, in numpy."""

from collections.abc import Sequence

import numpy as np
from scipy.special import ndtr


def groups(kind: str, most: int, depth: int) -> list[int]:
    """g_l of every layer."""
    if kind == "linear":
        return [1] * depth
    if kind in ("group-linear", "group-linear-shuffle"):
        return [most] * depth
    return [max(most // 2 ** (layer - 1), 1) for layer in range(1, depth + 1)]


def unit(
    kind: str,
    tokens: np.ndarray,
    layers: Sequence[tuple[Sequence[np.ndarray], np.ndarray]],
    reduce_weight: np.ndarray | None,
    reduce_bias: np.ndarray | None,
) -> np.ndarray:
    """e -> e_o of `[tokens, n]`; `layers` are (blocks, bias), `reduce_weight` has a row for each value of the output.

    A block stands in `blocks` once for each group that it serves. Without a reduction the last layer is linear.
    """
    values = tokens
    for number, (blocks, bias) in enumerate(layers):

        def split(rows: np.ndarray, count: int = len(blocks)) -> list[np.ndarray]:
            return np.split(rows, count, axis=1)

        if number and kind == "define":
            pairs = zip(split(tokens), split(values), strict=True)
            values = np.hstack([part for pair in pairs for part in pair])
        elif number and kind == "hgt-no-mixing":
            values = np.hstack([tokens, values])
        elif number and kind == "group-linear-shuffle":
            values = np.stack(split(values), axis=2).reshape(values.shape)
        output = np.hstack([part @ block for part, block in zip(split(values), blocks, strict=True)]) + bias
        if reduce_weight is not None or number < len(layers) - 1:
            output = output * ndtr(output)  # GELU
        if number and kind == "hgt-residual":
            output = output + values
        values = output
    return values if reduce_weight is None else values @ reduce_weight.T + reduce_bias
