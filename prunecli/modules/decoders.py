"""Quantised weights to float32, a few rows of a matrix at a time.

With q the stored number, s the scale of its block and z its zero point, a value is s (q - z):

- scaled: q is a float8 or int8, z = 0; bitsandbytes' int8 has a factor of 127 in each scale;
- packed: q and z have 2, 4 or 8 bits, less half of their range;
- gptq, awq: q and z have no sign;
- nvfp4: q is a float of four bits (E2M1), s one of eight, times or (compressed-tensors) divided by one of all;
- mxfp4: q is such a float, s a power of two; rows are what is stored as columns.

Values of fewer than 8 bits are looked up, two and more at once; those of 8 go by way of float16, of which CPUs make
float32 at once: ten times as fast as torch's casts of float8.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache

import ml_dtypes
import numpy as np
import torch

from prunecli.errors import CheckpointError
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.quantised import REMEDY, WORD, QuantisedWeight
from prunecli.tensors.dtypes import numpy_dtype

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The positive values of a float of four bits; the fourth bit is the sign."""

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where each of eight neighbours lies in its word, counted in values from the lowest bits."""

EXPONENT_BIAS = 127
INT8_MOST = 127
E4M3_NAN = 0x7F
"""Its bits but for the sign; there is no infinity."""

E4M3_FACTOR = 256.0
"""Two to the difference between the exponent biases of float16 and E4M3, 15 and 7."""

ROUTED_COLUMNS = "g_idx", "weight_g_idx"
"""The group of each column, where groups are not neighbours."""


def matrix_rows(weight: QuantisedWeight) -> int:
    """Rows of the matrix, or of each."""
    assert weight.shape is not None
    return weight.shape[-2] if len(weight.shape) > 1 else 1


class Scratch:
    """Room that one block after another is decoded in: to have it anew, page by page, takes longer than to decode."""

    def __init__(self) -> None:
        self._held: dict[str, np.ndarray] = {}

    def array(self, role: str, shape: tuple[int, ...], dtype: np.dtype | type) -> np.ndarray:
        """`[*shape]` of any values, until the next of this role."""
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        if role not in self._held or len(self._held[role]) < nbytes:
            self._held[role] = np.empty(nbytes, np.uint8)
        return self._held[role][:nbytes].view(dtype).reshape(shape)


class Parts:
    """What one matrix is stored in; whatever is read as a whole stays at hand.

    Args:
        source: that holds it.
        weight: of which it is.
        expert: its number, where the weight is a stack of matrices.
        scratch: of this thread.
    """

    def __init__(self, source: Checkpoint, weight: QuantisedWeight, expert: int, scratch: Scratch) -> None:
        self.weight, self.expert, self._source, self.scratch = weight, expert, source, scratch
        self._held: dict[str, np.ndarray] = {}

    def rows(self, first: int, last: int) -> np.ndarray:
        """`[last - first, stored columns]` of the values as they are stored, until the next call."""
        info = self._source.info(self.weight.parts["values"])
        row_bytes = info.nbytes // max(math.prod(info.shape[:-1]), 1)
        start = (self.expert * matrix_rows(self.weight) + first) * row_bytes
        found = self.scratch.array("stored", (last - first, row_bytes), np.uint8)
        self._source.read_range(info.name, start, start + found.nbytes, found.reshape(-1).data)
        return found.view(numpy_dtype(info.dtype))

    def whole(self, role: str) -> np.ndarray | None:
        """All of a part that is of this matrix; None: it has no such part."""
        if role not in self.weight.parts:
            return None
        if role not in self._held:
            info = self._source.info(self.weight.parts[role])
            stacked = len(self.weight.shape or ()) == 3 and info.shape[:1] == (self.weight.shape or ())[:1]
            shape = info.shape[1:] if stacked else info.shape
            nbytes = info.nbytes // info.shape[0] if stacked else info.nbytes
            start = self.expert * nbytes if stacked else 0
            read = self._source.read_range(info.name, start, start + nbytes, bytearray(nbytes))
            self._held[role] = np.frombuffer(read, numpy_dtype(info.dtype)).reshape(shape)
        return self._held[role]

    def scale(self) -> np.ndarray:
        """The scales, `[…]` float32.

        Raises:
            CheckpointError: one of them is no number.
        """
        if "as float32" not in self._held:
            stored = self.needed("scale")
            if stored.dtype == np.uint8:  # exponents of two alone
                found = np.ldexp(np.float32(1), stored.astype(np.int32) - EXPONENT_BIAS).astype(np.float32)
            else:
                found = stored.astype(np.float32)
            if not np.isfinite(found).all():
                raise self.fault(f"{self.weight.parts['scale']} holds a scale that is no number")
            self._held["as float32"] = found
        return self._held["as float32"]

    def needed(self, role: str) -> np.ndarray:
        """`whole` of a part that there is."""
        found = self.whole(role)
        assert found is not None
        return found

    def fault(self, message: str) -> CheckpointError:
        """The error of a part that cannot be."""
        return CheckpointError(f"{self._source.path}: {message}", REMEDY)


Decoder = Callable[[Parts, int, int], np.ndarray]
"""Rows from the first to before the last of a matrix: `[rows, columns]` float32, until the next call."""


def _scaled(parts: Parts, first: int, last: int) -> np.ndarray:
    stored, weight = parts.rows(first, last), parts.weight
    values = stored.astype(np.float32) if stored.dtype == np.int8 else _float8(stored, parts.scratch)
    scale, (rows, columns) = parts.scale(), weight.block
    if weight.parts["scale"].endswith(".SCB"):
        scale = scale / np.float32(INT8_MOST)
    grid = scale.reshape(-(-matrix_rows(weight) // rows), -(-values.shape[1] // columns))
    return _times(parts, values, grid[np.arange(first, last) // rows])


def _packed(parts: Parts, first: int, last: int) -> np.ndarray:
    weight = parts.weight
    assert weight.shape is not None
    columns, half = weight.shape[-1], np.float32(1 << (weight.bits - 1))
    values = _unpacked(parts.rows(first, last), weight.bits)[:, :columns] - half
    scale = parts.scale()
    scale = scale[first:last] if len(scale) > 1 else np.repeat(scale, last - first, 0)
    zeros = parts.whole("weight_zero_point")
    if zeros is not None:  # packed along the rows
        rows = slice(first, last) if len(parts.scale()) > 1 else slice(1)
        held = _unpacked(np.ascontiguousarray(zeros.T), weight.bits).T[rows] - half
        values -= _spread(parts, held, columns)
    return _times(parts, values, scale)


def _gptq(parts: Parts, first: int, last: int) -> np.ndarray:
    """Words lie along the inputs: turned around, they are as those of other formats."""
    weight = parts.weight
    words = np.ascontiguousarray(parts.needed("values")[:, first:last].T)
    values = _unpacked(words, weight.bits)
    zeros, most = parts.whole("qzeros"), (1 << weight.bits) - 1
    if zeros is None:
        values -= np.float32(1 << (weight.bits - 1))
    else:
        held = _unpacked(zeros, weight.bits)[:, first:last].T.astype(np.int32)
        values -= _spread(parts, ((held + weight.zero_offset) & most).astype(np.float32), values.shape[1])
    return _times(parts, values, parts.scale()[:, first:last].T)


def _awq(parts: Parts, first: int, last: int) -> np.ndarray:
    """Words lie along the outputs, their values in an order of their own."""
    per_word = WORD // parts.weight.bits
    start, stop = first // per_word, -(-last // per_word)

    def columns(stored: np.ndarray) -> np.ndarray:
        values = _unpacked(np.ascontiguousarray(stored[:, start:stop]), parts.weight.bits)
        ordered = values.reshape(len(values), -1, per_word)[:, :, AWQ_ORDER].reshape(len(values), -1)
        found: np.ndarray = ordered[:, first - start * per_word : last - start * per_word].T
        return found

    values = np.ascontiguousarray(columns(parts.needed("values")))
    zeros = parts.whole("qzeros")
    if zeros is None:
        values -= np.float32(1 << (parts.weight.bits - 1))
    else:
        values -= _spread(parts, columns(zeros), values.shape[1])
    return _times(parts, values, parts.scale()[:, first:last].T)


def _nvfp4(parts: Parts, first: int, last: int) -> np.ndarray:
    values = _float4(parts.rows(first, last))
    scale = parts.scale()[first:last]
    whole = parts.whole("weight_scale_2")
    if whole is not None:
        scale = scale * whole.astype(np.float32).reshape(-1)[:1]
    elif (divisor := parts.whole("weight_global_scale")) is not None:
        scale = scale / divisor.astype(np.float32).reshape(-1)[:1]
    # Its scales are of 8 bits: those of tiny values may well be 0.
    return _times(parts, values, scale, may_vanish=True)


def _mxfp4(parts: Parts, first: int, last: int) -> np.ndarray:
    weight = parts.weight
    assert weight.shape is not None
    size = weight.block[1]
    start, stop = first // size, -(-last // size)
    outputs, inputs = weight.shape[2], weight.shape[1]
    blocks = parts.needed("values").reshape(outputs, inputs // size, -1)[:, start:stop]
    values = _float4(np.ascontiguousarray(blocks).reshape(outputs, -1))
    scale = parts.scale().reshape(outputs, -1)[:, start:stop]
    wide = _times(parts, values, scale)
    return np.ascontiguousarray(wide[:, first - start * size : last - start * size].T)


DECODERS: Mapping[str, Decoder] = {
    "scaled": _scaled,
    "packed": _packed,
    "gptq": _gptq,
    "awq": _awq,
    "nvfp4": _nvfp4,
    "mxfp4": _mxfp4,
}
"""Scheme -> what decodes it; the others are moved alone."""


def _times(parts: Parts, values: np.ndarray, scale: np.ndarray, *, may_vanish: bool = False) -> np.ndarray:
    """Values times their scales, in place.

    Args:
        parts: of the matrix.
        values: `[rows, columns]` float32, less their zero points.
        scale: `[rows, groups]` float32.
        may_vanish: whether a scale of 0 may belong to values that are not.

    Raises:
        CheckpointError: one does that may not.
    """
    if not may_vanish and not scale.all():
        spread = _spread(parts, scale, values.shape[1])
        if values[spread == 0].any():
            raise parts.fault(f"{parts.weight.parts['scale']} holds a scale of 0 where values are not")
    rows, columns = values.shape
    size = parts.weight.block[1]
    if _groups_of(parts) is None and columns == size * scale.shape[1]:
        # torch goes through short blocks three times as fast as numpy.
        blocks = torch.from_numpy(values).view(rows, scale.shape[1], size)
        blocks.mul_(torch.from_numpy(np.ascontiguousarray(scale))[:, :, None])
    else:
        values *= _spread(parts, scale, columns)
    return values


def _spread(parts: Parts, by_group: np.ndarray, columns: int) -> np.ndarray:
    """`[rows, groups]` to `[rows, columns]`."""
    groups = _groups_of(parts)
    if groups is None:
        groups = np.arange(columns) // parts.weight.block[1]
    return by_group[:, groups]


def _groups_of(parts: Parts) -> np.ndarray | None:
    """The group of each column, `[columns]`; None: neighbours share one.

    Raises:
        CheckpointError: a group that there is none of.
    """
    found = next((held for role in ROUTED_COLUMNS if (held := parts.whole(role)) is not None), None)
    if found is None or (found < 0).all():  # what is not set
        return None
    if found.dtype.kind not in "iu":
        raise parts.fault(f"{parts.weight.name}: the groups of its columns are no whole numbers")
    scale = parts.scale()
    count = scale.shape[0] if parts.weight.scheme == "gptq" else scale.shape[-1]
    if found.min() < 0 or found.max() >= count:
        raise parts.fault(f"{parts.weight.name}: a column is of group {int(found.max())}, of {count}")
    return found


def _unpacked(words: np.ndarray, bits: int) -> np.ndarray:
    """`[rows, words]` int32 to `[rows, values]` float32 without a sign, the lowest bits first."""
    return _looked_up(words.view(np.uint8), _integers(bits))


def _float8(stored: np.ndarray, scratch: Scratch) -> np.ndarray:
    """`[rows, columns]` of a float type of one byte to float32."""
    bits, plain = stored.view(np.int8), scratch.array("bits", stored.shape, np.int8)
    half = torch.from_numpy(scratch.array("half", stored.shape, np.int16))
    values = scratch.array("values", stored.shape, np.float32)
    half.copy_(torch.from_numpy(bits))
    factor = 1.0
    if stored.dtype == ml_dtypes.float8_e5m2:
        half.mul_(1 << 8)  # it is the upper byte of a float16
    elif (
        stored.dtype == ml_dtypes.float8_e4m3fn and np.bitwise_and(bits, E4M3_NAN, out=plain).max() < E4M3_NAN
    ):
        # Moved to where a float16 has exponent and mantissa; the sign is twice there, at its own place and below.
        half.mul_(1 << 7).bitwise_and_(~(1 << 14))
        factor = E4M3_FACTOR
    else:
        return _looked_up(stored.view(np.uint8), _small_floats(stored.dtype))
    torch.from_numpy(values).copy_(half.view(torch.float16)).mul_(factor)
    return values


def _float4(stored: np.ndarray) -> np.ndarray:
    """`[rows, bytes]` to `[rows, 2 bytes]` float32, the lower half of a byte first."""
    return _looked_up(stored, _fours())


def _looked_up(stored: np.ndarray, table: np.ndarray) -> np.ndarray:
    """`[rows, bytes]` uint8 to `[rows, bytes x values]`, by `[256, values]` float32."""
    whole = table.view(np.dtype((np.void, table.shape[1] * table.itemsize))).reshape(-1)
    found: np.ndarray = np.take(whole, stored, mode="clip").view(np.float32).reshape(len(stored), -1)
    return found


@cache
def _integers(bits: int) -> np.ndarray:
    shifts = np.arange(0, 8, bits)
    return ((np.arange(256)[:, None] >> shifts) & ((1 << bits) - 1)).astype(np.float32)


@cache
def _fours() -> np.ndarray:
    values = np.array([*E2M1, *(-value for value in E2M1)], np.float32)
    return np.stack([values[np.arange(256) & 15], values[np.arange(256) >> 4]], axis=1)


@cache
def _small_floats(dtype: np.dtype) -> np.ndarray:
    return np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)[:, None]
