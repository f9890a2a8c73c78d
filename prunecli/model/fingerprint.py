"""Which model a checkpoint is: a few values of every tensor."""

import hashlib
import json
from collections.abc import Iterable, Mapping

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
    digest, all_names = hashlib.sha256(), "".join(samples)
    is_plain = all_names.isascii() and all_names.isprintable() and not {'"', "\\"} & {*all_names}
    for name in sorted(samples):  # as JSON, `dumps` of which takes three times as long
        quoted = f'"{name}"' if is_plain else json.dumps(name)
        digest.update(f"[{quoted}, {list(tensors[name].shape)}]".encode() + samples[name])
    return f"sha256:{digest.hexdigest()}"


def samples_of(reader: TensorReader) -> dict[str, bytes]:
    """Return the sample of each tensor, read in the order of the files.

    Raises:
        CheckpointError: a file ends early.
    """
    found: dict[str, dict[str, memoryview]] = {}
    for name, info in reader.tensors.items():
        start, stop = sample_range(info)
        found.setdefault(info.dtype, {})[name] = reader.read_range(name, start, bytearray(stop - start))
    samples = {}
    for dtype, held in found.items():  # all of a type at once: there may be tens of thousands of tensors
        whole, start = rounded(b"".join(held.values()), dtype), 0
        size, stored = 2 if is_float(dtype) else itemsize(dtype), itemsize(dtype)
        for name, data in held.items():
            stop = start + len(data) // stored * size
            samples[name], start = whole[start:stop], stop
    return samples


def router_fingerprint(reader: TensorReader, names: Iterable[str]) -> str:
    """ "sha256:<hex>" over names, shapes and all values of routers, which quantised copies of a model keep.

    Values are rounded to float16, so that a copy may have them in another type.

    Raises:
        CheckpointError: a file ends early.
    """
    digest = hashlib.sha256()
    for name in sorted(names):
        info = reader.info(name)
        digest.update(json.dumps([name, list(info.shape)]).encode())
        digest.update(rounded(reader.read(name).reshape(-1).view(np.uint8).data, info.dtype))
    return f"sha256:{digest.hexdigest()}"


def sample_range(info: TensorInfo) -> tuple[int, int]:
    """The bytes of a tensor, as (start, stop), whose values enter the fingerprint."""
    count, size = info.numel, itemsize(info.dtype)
    start = max(0, count // 2 - FINGERPRINT_VALUES // 2)
    return start * size, min(start + FINGERPRINT_VALUES, count) * size


def rounded(data: bytes | memoryview, dtype: str) -> bytes:
    """Values as they enter the fingerprint: in float16 where they are numbers of floating point."""
    values = np.frombuffer(data, dtype=numpy_dtype(dtype))
    if not is_float(dtype):
        return values.tobytes()
    with np.errstate(over="ignore", invalid="ignore"):
        short = values.astype(np.float16)
    short[np.isnan(short)] = np.float16("nan")  # one NaN for all its bit patterns
    return short.tobytes()
