"""Casts between floating-point types: every value rounded once, to the nearest, ties to even."""

from __future__ import annotations

import numpy as np

from prunecli.errors import CheckpointError
from prunecli.tensors.dtypes import config_dtype, numpy_dtype

_EXPONENT = {"F16": 0x7C00, "BF16": 0x7F80}
"""Bits that are all set in an infinity or NaN, and in nothing else."""


_LOST_BITS = 29
_LOST = np.int64((1 << _LOST_BITS) - 1)
"""Bits of a float64's fraction that a float32 has no room for."""

_SMALLEST_NORMAL = np.float32(2.0**-126)


def cast(values: np.ndarray, dtype: str, where: str) -> np.ndarray:
    """`values` in the safetensors type `dtype`; what is too small becomes subnormal or zero.

    Args:
        where: the tensor, for messages.

    Raises:
        CheckpointError: a NaN or infinity among the values, or a finite one that the type cannot hold.
    """
    target = numpy_dtype(dtype)
    is_two_steps = values.dtype == np.float64 and target.kind != "f"
    near = _odd_float32(values) if is_two_steps else values
    with np.errstate(over="ignore", invalid="ignore"):
        result = near.astype(target)
    if not _all_finite(result, dtype):
        lost = float(values[~np.isfinite(result)][0])
        if np.isfinite(lost):
            raise CheckpointError(
                f"{where} holds {lost:g}, too large for {config_dtype(dtype)}",
                "Choose bfloat16 or float32, or keep the stored type.",
            )
        raise CheckpointError(
            f"{where} holds {lost}, which no cast can mend", "Check where the checkpoint comes from."
        )
    return result


def _all_finite(values: np.ndarray, dtype: str) -> bool:
    exponent = _EXPONENT.get(dtype)
    if exponent is None or not values.size:
        return bool(np.isfinite(values).all())
    # Integer operations on the bits are several times faster than isfinite on half floats.
    bits = np.bitwise_and(values.view(np.uint16), np.uint16(exponent))
    return int(bits.max()) != exponent


def _odd_float32(values: np.ndarray) -> np.ndarray:
    """float64 as float32 rounded to odd: what is inexact ends in a one, so that a cast that follows rounds only once.

    The types of ml_dtypes are reached through float32; rounding to nearest on the way would round twice.
    """
    bits = values.view(np.int64)
    lost = bits & _LOST
    odd = (bits ^ lost) | (np.minimum(lost, 1) << _LOST_BITS)
    with np.errstate(over="ignore", invalid="ignore"):
        near = np.asarray(odd.view(np.float64).astype(np.float32))
        tiny = np.abs(near) < _SMALLEST_NORMAL
    if (
        tiny.any() and values[tiny].any()
    ):  # float32 has fewer bits for these: they were rounded to nearest after all
        near[tiny] = _odd_subnormal(values[tiny])
    return near


def _odd_subnormal(values: np.ndarray) -> np.ndarray:
    """The same for values below 2^-126, all of which are multiples of 2^-149 in float32."""
    units = np.abs(values) * 2.0**149
    whole = np.floor(units)
    whole += (whole != units) & (whole % 2 == 0)
    signed: np.ndarray = np.copysign(whole * 2.0**-149, values)
    return signed.astype(np.float32)
