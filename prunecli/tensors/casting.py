"""Casts between floating-point types: every value rounded once, to the nearest, ties to even."""

from __future__ import annotations

import numpy as np

from prunecli.errors import CheckpointError
from prunecli.tensors.dtypes import config_dtype, numpy_dtype

_EXPONENT = {"F16": 0x7C00, "BF16": 0x7F80}
"""Bits that are all set in an infinity or NaN, and in nothing else."""


def cast(values: np.ndarray, dtype: str, where: str) -> np.ndarray:
    """`values` in the safetensors type `dtype`; what is too small becomes subnormal or zero.

    Args:
        where: the tensor, for messages.

    Raises:
        CheckpointError: a NaN or infinity among the values, or a finite one that the type cannot hold.
    """
    wanted = numpy_dtype(dtype)
    if values.dtype == np.float64 and wanted.kind != "f":
        values = _odd_float32(values)
    with np.errstate(over="ignore", invalid="ignore"):
        made = values.astype(wanted)
    if not _all_finite(made, dtype):
        lost = float(values[~np.isfinite(made)][0])
        if np.isfinite(lost):
            raise CheckpointError(
                f"{where} holds {lost:g}, too large for {config_dtype(dtype)}",
                "Choose bfloat16 or float32, or keep the stored type.",
            )
        raise CheckpointError(
            f"{where} holds {lost}, which no cast can mend", "Check where the checkpoint comes from."
        )
    return made


def _all_finite(values: np.ndarray, dtype: str) -> bool:
    exponent = _EXPONENT.get(dtype)
    if exponent is None or not values.size:
        return bool(np.isfinite(values).all())
    # Integer operations on the bits are several times faster than isfinite on half floats.
    bits = np.bitwise_and(values.view(np.uint16), np.uint16(exponent))
    return int(bits.max()) != exponent


def _odd_float32(values: np.ndarray) -> np.ndarray:
    """float64 rounded to odd: what is inexact ends in a one, so that the cast that follows rounds as if at once.

    The types of ml_dtypes are reached through float32; rounding to nearest on the way would round twice.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        near = values.astype(np.float32)
    bits = near.view(np.int32)
    wide = near.astype(np.float64)
    even = (wide != values) & ~np.isnan(values) & (bits & 1 == 0)
    # The neighbours of an even one are odd; the value lies between `near` and one of them.
    bits += np.where(even, np.where(np.abs(wide) < np.abs(values), 1, -1), 0).astype(np.int32)
    return near
