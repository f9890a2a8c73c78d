"""Which model a checkpoint is: a few values of every tensor."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

import numpy as np

from prunecli.tensors.dtypes import is_float, itemsize, numpy_dtype
from prunecli.tensors.reader import TensorInfo, TensorReader

FINGERPRINT_VALUES = 16
"""Values of each tensor that enter the fingerprint: those in its middle, so that one short read a tensor is enough."""


def fingerprint(tensors: Mapping[str, TensorInfo], samples: Mapping[str, bytes]) -> str:
    """ "sha256:<hex>" over every tensor's name, shape and sample, in the order of names, so that files do not matter.

    Args:
        tensors: by name.
        samples: of each what `rounded` makes of the bytes in its `sample_range`.
    """
    digest = hashlib.sha256()
    for name in sorted(samples):
        digest.update(json.dumps([name, list(tensors[name].shape)]).encode())
        digest.update(samples[name])
    return f"sha256:{digest.hexdigest()}"


def samples_of(reader: TensorReader) -> dict[str, bytes]:
    """Of each tensor the sample, read in file order, for the disk's sake.

    Raises:
        CheckpointError: a file ends early.
    """
    found: dict[str, dict[str, bytes]] = {}
    for name, info in reader.tensors.items():
        start, stop = sample_range(info)
        data = reader.read_range(name, start, stop, bytearray(stop - start)) if stop > start else b""
        found.setdefault(info.dtype, {})[name] = bytes(data)
    samples = {}
    for dtype, held in found.items():  # all of a type at once: there may be tens of thousands of tensors
        whole = memoryview(rounded(b"".join(held.values()), dtype))
        size = 2 if is_float(dtype) else itemsize(dtype)
        for name, data in held.items():
            count = len(data) // itemsize(dtype) * size
            samples[name], whole = bytes(whole[:count]), whole[count:]
    return samples


def sample_range(info: TensorInfo) -> tuple[int, int]:
    """The bytes of a tensor, as (start, stop), whose values enter the fingerprint."""
    start = max(0, info.numel // 2 - FINGERPRINT_VALUES // 2)
    size = itemsize(info.dtype)
    return start * size, min(start + FINGERPRINT_VALUES, info.numel) * size


def rounded(data: bytes | memoryview, dtype: str) -> bytes:
    """Values as they enter the fingerprint: in float16 where they are numbers of floating point."""
    values = np.frombuffer(data, dtype=numpy_dtype(dtype))
    if not is_float(dtype):
        return values.tobytes()
    with np.errstate(over="ignore", invalid="ignore"):
        short = values.astype(np.float16)
    short[np.isnan(short)] = np.float16("nan")  # one NaN for all its bit patterns
    return short.tobytes()
