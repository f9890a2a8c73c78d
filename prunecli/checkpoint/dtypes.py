"""Element types under their safetensors names, and sizes in bytes as people write them."""

from __future__ import annotations

import re

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


_UNITS = {"": 1, "b": 1} | {
    prefix + ending: base**power
    for power, prefix in enumerate("kmgt", start=1)
    for ending, base in (("ib", 1024), ("i", 1024), ("b", 1000), ("", 1024))
}


def parse_size(text: str) -> int:
    """Bytes of "32GiB" (1024-based), "32GB" (1000-based), "32G" (as 32GiB), "1.5 TiB", "1048576".

    Raises:
        UsageError: not a positive finite size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-zA-Z]*)\s*", text)
    unit = _UNITS.get(match.group(2).lower()) if match else None
    size = int(float(match.group(1)) * unit) if match and unit else 0
    if size < 1:
        raise UsageError(f'"{text}" is not a size', 'Write it as "30GiB", "512MiB" or a number of bytes.')
    return size
