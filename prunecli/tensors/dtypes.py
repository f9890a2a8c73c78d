"""Element types under their safetensors names and as people write them; casts between those of floating point.

A cast rounds every value once, to the nearest, ties to even.
"""

import math
from functools import lru_cache

import ml_dtypes  # noqa: F401 (teaches numpy bfloat16 and float8)
import numpy as np

from prunecli.errors import CheckpointError, UsageError

_NAMES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "uint16": "U16",
    "int16": "I16",
    "float16": "F16",
    "bfloat16": "BF16",
    "uint32": "U32",
    "int32": "I32",
    "float32": "F32",
    "uint64": "U64",
    "int64": "I64",
    "float64": "F64",
    "complex64": "C64",
}
"""torch's, numpy's and config.json's name -> safetensors' name."""
_NUMPY = {name: np.dtype(known) for known, name in _NAMES.items()}

_SHORT = {
    "fp16": "F16",
    "half": "F16",
    "bf16": "BF16",
    "fp32": "F32",
    "float": "F32",
    "fp64": "F64",
    "double": "F64",
}
COMPUTED = ("float32", "bfloat16", "float16")
"""Types that models run in and that weights are written in, as config.json calls them."""

_EXPONENT = {"F16": 0x7C00, "BF16": 0x7F80}
"""Bits that are all set in an infinity or NaN, and in nothing else."""


def is_known(dtype: str) -> bool:
    """Whether `dtype` is a safetensors type that prunecli reads."""
    return dtype in _NUMPY


def numpy_dtype(dtype: str) -> np.dtype:
    """The numpy type (of ml_dtypes for bfloat16 and float8) of a safetensors type that `is_known`."""
    return _NUMPY[dtype]


def itemsize(dtype: str) -> int:
    """Bytes per element."""
    return numpy_dtype(dtype).itemsize


@lru_cache(maxsize=1 << 12)
def size_of(shape: tuple[int, ...], dtype: str) -> int:
    """Bytes of a tensor of this shape and type; tens of thousands have a few shapes."""
    return math.prod(shape) * itemsize(dtype)


def is_float(dtype: str) -> bool:
    """Whether casts between floating-point types apply to it."""
    return dtype.startswith(("F", "BF"))


def config_dtype(dtype: str) -> str:
    """The name that config.json uses: "F16" -> "float16"."""
    return str(_NUMPY[dtype].name)


def parse_dtype(text: str) -> str:
    """The safetensors name of a type that is written "float16", "torch.float16", "fp16" or "F16".

    Raises:
        UsageError: an unknown type.
    """
    key = text.strip().lower().removeprefix("torch.")
    dtype = _NAMES.get(key) or _SHORT.get(key) or key.upper()
    if not is_known(dtype):
        raise UsageError(f'unknown type "{text}"', "Use float32, float16 or bfloat16.")
    return dtype


def parse_computed(text: str, also: tuple[str, ...]) -> str:
    """Return the name in `COMPUTED` of a type that is written "float16", "torch.float16", "fp16", "half" or "F16".

    Args:
        also: other words that are answers.

    Raises:
        UsageError: none of them.
    """
    if text.strip().lower() in also:
        return text.strip().lower()
    try:
        name = config_dtype(parse_dtype(text))
    except UsageError:
        name = ""
    if name not in COMPUTED:
        raise UsageError(f"`dtype={text}`: no such type", f"Choose {', '.join((*also, *COMPUTED))}.")
    return name


def cast(values: np.ndarray, dtype: str, where: str) -> np.ndarray:
    """`values` in the safetensors type `dtype`; what is too small becomes subnormal or zero.

    Args:
        values: `[...]`, floating-point numbers.
        dtype: as `numpy_dtype`.
        where: the tensor, for messages.

    Returns:
        `[...]`, of the same shape.

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
    with np.errstate(over="ignore", invalid="ignore"):
        near = np.asarray(values.astype(np.float32))
    bits = near.view(np.uint32)
    bits -= np.abs(near) > np.abs(values)  # towards zero
    bits |= near != values
    return near
