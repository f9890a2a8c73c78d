"""Element types under their safetensors names, and as people write them."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from prunecli.errors import CheckpointError, UsageError

_NUMPY: dict[str, np.dtype] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "F32": np.dtype(np.float32),
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "F64": np.dtype(np.float64),
    "C64": np.dtype(np.complex64),
}

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
"""torch's and config.json's name -> safetensors' name."""

_SHORT = {
    "fp16": "F16",
    "half": "F16",
    "bf16": "BF16",
    "fp32": "F32",
    "float": "F32",
    "fp64": "F64",
    "double": "F64",
}


def is_known(dtype: str) -> bool:
    """Whether `dtype` is a safetensors type that prunecli reads."""
    return dtype in _NUMPY


def numpy_dtype(dtype: str) -> np.dtype:
    """The numpy type (of ml_dtypes for bfloat16 and float8) of a safetensors type.

    Raises:
        CheckpointError: a type that prunecli does not read (those under one byte).
    """
    if dtype not in _NUMPY:
        raise CheckpointError(
            f"tensors of type {dtype} are not supported", f"Known types: {', '.join(_NUMPY)}."
        )
    return _NUMPY[dtype]


def itemsize(dtype: str) -> int:
    """Bytes per element."""
    return numpy_dtype(dtype).itemsize


def is_float(dtype: str) -> bool:
    """Whether casts between floating-point types apply to it."""
    return dtype.startswith(("F", "BF"))


def config_dtype(dtype: str) -> str:
    """The name that config.json uses: "F16" -> "float16"."""
    return next(name for name, known in _NAMES.items() if known == dtype)


def parse_dtype(text: str) -> str:
    """The safetensors name of a type that is written "float16", "torch.float16", "fp16" or "F16".

    Raises:
        UsageError: an unknown type.
    """
    key = text.strip().lower().removeprefix("torch.")
    found = _NAMES.get(key) or _SHORT.get(key) or (key.upper() if is_known(key.upper()) else None)
    if found is None:
        raise UsageError(f'unknown type "{text}"', "Use float32, float16 or bfloat16.")
    return found


COMPUTED = ("float32", "bfloat16", "float16")
"""Types that models run in and that weights are written in, as config.json calls them."""


def parse_computed(text: str, option: str = "--dtype", also: tuple[str, ...] = ()) -> str:
    """The one of `COMPUTED` that is written "float16", "torch.float16", "fp16", "half" or "F16".

    Args:
        option: that a message names.
        also: other words that are answers.

    Raises:
        UsageError: none of them.
    """
    if text.strip().lower() in also:
        return text.strip().lower()
    try:
        found = config_dtype(parse_dtype(text))
    except UsageError:
        found = None
    if found not in COMPUTED:
        raise UsageError(f"{option} {text}: no such type", f"Choose {', '.join((*also, *COMPUTED))}.")
    return found
