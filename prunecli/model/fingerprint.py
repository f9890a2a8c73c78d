"""A checkpoint's fingerprint: which model it is, whatever type and files its weights are stored in."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

import numpy as np

from prunecli.tensors.dtypes import is_float, itemsize, numpy_dtype

if TYPE_CHECKING:
    from prunecli.model.checkpoint import Checkpoint

VALUES = 16
"""Values of each tensor that enter: those in its middle, so that one short read per tensor is enough."""


def fingerprint(checkpoint: Checkpoint) -> str:
    """ "sha256:<hex>" over every tensor's name, shape and 16 values, rounded to float16.

    A float32 checkpoint and its float16 copy have the same fingerprint, as have its .bin and .safetensors
    forms; a bfloat16 copy of float32 weights has lost bits that float16 keeps, and is another model.
    """
    # Read in file order, for the disk's sake; hashed in the order of names, so that files do not matter.
    sampled = {name: _sample(checkpoint, name) for name in checkpoint.tensors}
    digest = hashlib.sha256()
    for name in sorted(sampled):
        digest.update(json.dumps([name, list(checkpoint.tensors[name].shape)]).encode())
        digest.update(sampled[name])
    return f"sha256:{digest.hexdigest()}"


def _sample(checkpoint: Checkpoint, name: str) -> bytes:
    info = checkpoint.tensors[name]
    size = itemsize(info.dtype)
    start = max(0, info.numel // 2 - VALUES // 2)
    count = min(VALUES, info.numel - start)
    if count == 0:
        return b""
    data = checkpoint.read_range(name, start * size, (start + count) * size, bytearray(count * size))
    values = np.frombuffer(data, dtype=numpy_dtype(info.dtype))
    if not is_float(info.dtype):
        return values.tobytes()
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = values.astype(np.float16)
    rounded[np.isnan(rounded)] = np.float16("nan")  # one NaN for all its bit patterns
    return rounded.tobytes()
