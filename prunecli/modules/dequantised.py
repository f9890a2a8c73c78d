"""A quantised checkpoint as one of plain weights, decoded to float32 a few rows at a time while they are read.

With q the stored number, s the scale of its block and z its zero point, a value is s (q - z):

- scaled: q is a float8 or int8, z = 0; bitsandbytes' int8 has a factor of 127 in each scale;
- packed: q and z have 2, 4 or 8 bits, less half of their range;
- gptq, awq: q and z are unsigned;
- nvfp4: q is a float of four bits (E2M1), s is an eight-bit scale times or (compressed-tensors) divided by one for all;
- mxfp4: q is such a float, s a power of two; the matrix is stored transposed.

The values of each byte are looked up in a table.
"""

import math
import threading
from functools import cache, cached_property
from typing import Any

import ml_dtypes
import numpy as np
import torch

from prunecli.errors import CheckpointError, UnsupportedModelError
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.quantised import KEYS, REMEDY, WORD, QuantisedWeight, values_of
from prunecli.modules.filling import DTYPES
from prunecli.tensors.dtypes import numpy_dtype, parse_dtype
from prunecli.tensors.reader import Stored

BLOCK_VALUES = 1 << 17
"""Values that are decoded at once: about as many as a core's cache holds."""

ALIGNED_ROWS = 32
"""Blocks begin at multiples of this row, at which words of packed rows and blocks of MXFP4 begin too."""

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Place of each of eight neighbouring values in its word, counted from the lowest bits."""

INT8_MOST = 127
FLOAT4 = np.dtype(ml_dtypes.float4_e2m1fn)
ROUTED_COLUMNS = "g_idx", "weight_g_idx"
"""Parts that hold the group of each column, if a group's columns are not neighbours."""


def as_run(checkpoint: Checkpoint, dtype: torch.dtype) -> Checkpoint:
    """The checkpoint with its quantised weights as plain ones of the type `dtype`; one without any as it is.

    What is returned reads from `checkpoint`, which must stay open.

    Raises:
        UnsupportedModelError: weights that are stored in a way that is moved, and not decoded.
    """
    if not checkpoint.quantised:
        return checkpoint
    for weight in checkpoint.quantised.values():
        if weight.scheme not in DECODERS:
            raise UnsupportedModelError(
                f"{checkpoint.path}: {weight.name} is quantised by {weight.scheme}, which prunecli moves and does not "
                "read",
                "Run the model before it was quantised; prune-experts --keep or --metric random need no run.",
            )
    return DequantisedCheckpoint(checkpoint, parse_dtype(str(dtype)))


class DequantisedCheckpoint(Checkpoint):
    """See `as_run`."""

    def __init__(self, stored: Checkpoint, dtype: str) -> None:
        self._source, self._weights = stored, stored.quantised
        self._dtype, self._values = DTYPES[dtype], values_of(stored.tensors, stored.quantised, dtype, {})
        self._of_thread = threading.local()  # each thread keeps the matrix that it reads
        super().__init__(stored.path, {k: v for k, v in stored.config.items() if k not in KEYS}, ())
        self.files, self.is_remote = stored.files, stored.is_remote

    @cached_property
    def fingerprint(self) -> str:
        """The fingerprint of the stored checkpoint."""
        return self._source.fingerprint

    @cached_property
    def _by_stored_name(self) -> dict[str, tuple[int, Stored]]:
        return {name: (0, Stored(info, 0)) for name, info in self._values.items()}

    def _equal(self, _one: str, _other: str) -> bool:
        """Return False: the source has left out tied tensors that are equal."""
        return False

    def stored_bytes(self, name: str) -> int:
        """Return the bytes in the source's files; of a quantised weight with its scales."""
        parts = self._weights[name].parts.values() if name in self._weights else (name,)
        return sum(map(self._source.stored_bytes, parts))

    def read_range(self, name: str, start: int, buffer: memoryview | bytearray) -> memoryview:
        """Bytes of the decoded values, decoded anew at each call; see `TensorReader.read_range`.

        Raises:
            CheckpointError: as there, or a scale is no number, or 0 where values are not.
        """
        weight = self._weights.get(name)
        if weight is None:
            return self._source.read_range(name, start, buffer)
        view = memoryview(buffer).cast("B")
        if not len(view):
            return view
        columns, height = self.info(name).shape[-1], matrix_rows(weight)
        at_once = ALIGNED_ROWS * max(1, BLOCK_VALUES // (ALIGNED_ROWS * columns))
        target, done = torch.frombuffer(view, dtype=self._dtype), 0
        while done < len(target):
            value = start // self._dtype.itemsize + done
            expert, row = divmod(value // columns, height)  # all matrices are one below another
            first = row - row % ALIGNED_ROWS
            matrix = getattr(self._of_thread, "matrix", None)
            if matrix is None or matrix.weight is not weight or matrix.expert != expert:
                matrix = self._of_thread.matrix = Matrix(self._source, weight, expert)
            decoded = torch.from_numpy(matrix.decode(first, min(first + at_once, height))).reshape(-1)
            values = decoded[value - (expert * height + first) * columns :][: len(target) - done]
            target[done : done + len(values)].copy_(values)
            done += len(values)
        return view


def matrix_rows(weight: QuantisedWeight) -> int:
    """Rows of the matrix, or of each."""
    assert weight.shape is not None
    return weight.shape[-2] if len(weight.shape) > 1 else 1


class Matrix:
    """One quantised matrix; parts that are read as a whole are read once.

    Args:
        source: the checkpoint that stores it.
        weight: the weight that it is, or that it is part of.
        expert: its number, if the weight is a stack of matrices; else 0.
    """

    def __init__(self, source: Checkpoint, weight: QuantisedWeight, expert: int) -> None:
        self.weight, self.expert, self._source = weight, expert, source
        self.shape = weight.shape or ()
        self._held: dict[str, np.ndarray] = {}

    def decode(self, first: int, last: int) -> np.ndarray:
        """Rows `first`, a multiple of `ALIGNED_ROWS`, to before `last`: `[rows, columns]` float32.

        Raises:
            CheckpointError: a part cannot be read, or holds values that cannot be.
        """
        values, scale, zeros = DECODERS[self.weight.scheme](self, first, last)
        if zeros is not None:
            values -= self._by_column(zeros, values.shape[1])
        factors = self._by_column(scale, values.shape[1])
        # NVFP4's scales have 8 bits: those of tiny values may well be 0.
        may_vanish = self.weight.scheme == "nvfp4" or scale.all()
        if not may_vanish and (values != 0)[np.broadcast_to(factors == 0, values.shape)].any():
            raise self._fault(f"{self.weight.parts['scale']} holds a scale of 0 where values are not")
        values *= factors
        return values

    def rows(self, first: int, last: int) -> np.ndarray:
        """`[last - first, stored columns]` of the values as they are stored."""
        info = self._source.info(self.weight.parts["values"])
        row_bytes = info.nbytes // max(math.prod(info.shape[:-1]), 1)
        start = (self.expert * matrix_rows(self.weight) + first) * row_bytes
        found = np.empty((last - first, row_bytes), np.uint8)
        self._source.read_range(info.name, start, found.reshape(-1).data)
        return found.view(numpy_dtype(info.dtype))

    def part(self, role: str) -> Any:
        """This matrix's part of a stored tensor; None if there is no such tensor."""
        if role not in self.weight.parts:
            return None
        if role not in self._held:
            info = self._source.info(self.weight.parts[role])
            shape, nbytes, start = info.shape, info.nbytes, 0
            if len(self.shape) == 3 and shape[:1] == self.shape[:1]:  # of all experts
                shape, nbytes = shape[1:], nbytes // shape[0]
                start = self.expert * nbytes
            read = self._source.read_range(info.name, start, bytearray(nbytes))
            self._held[role] = np.frombuffer(read, numpy_dtype(info.dtype)).reshape(shape)
        return self._held[role]

    @cached_property
    def scale(self) -> np.ndarray:
        """The scales, `[…]` float32.

        Raises:
            CheckpointError: one of them is no number.
        """
        stored = self.part("scale")
        if stored.dtype == np.uint8:
            stored = stored.view(ml_dtypes.float8_e8m0fnu)
        found: np.ndarray = stored.astype(np.float32)
        if not np.isfinite(found).all():
            raise self._fault(f"{self.weight.parts['scale']} holds a scale that is no number")
        return found

    @cached_property
    def _groups(self) -> np.ndarray | None:
        """The group of each column, `[columns]`; None if a group's columns are neighbours.

        Raises:
            CheckpointError: a group that does not exist.
        """
        parts = (held for role in ROUTED_COLUMNS if (held := self.part(role)) is not None)
        found: np.ndarray | None = next(parts, None)
        if found is None or (found < 0).all():  # -1: not set
            return None
        if found.dtype.kind not in "iu":
            raise self._fault(f"{self.weight.name}: the groups of its columns are no whole numbers")
        count = self.scale.shape[0] if self.weight.scheme == "gptq" else self.scale.shape[-1]
        if found.min() < 0 or found.max() >= count:
            raise self._fault(f"{self.weight.name}: a column is of group {int(found.max())}, of {count}")
        return found

    def _by_column(self, by_group: np.ndarray, columns: int) -> np.ndarray:
        """`[rows, groups]`, or `[rows, columns]` already, to `[rows, columns]`."""
        if self._groups is not None:
            return by_group[:, self._groups]
        if by_group.shape[1] == columns:
            return by_group
        return np.repeat(by_group, self.weight.block[1], axis=1)[:, :columns]

    def _fault(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self._source.path}: {message}", REMEDY)


Decoded = tuple[np.ndarray, np.ndarray, np.ndarray | None]
"""Values `[rows, columns]`; their scales and zero points by group, `[rows or 1, groups]`, or by column; all float32."""


def _scaled(matrix: Matrix, first: int, last: int) -> Decoded:
    stored, weight = matrix.rows(first, last), matrix.weight
    scale = matrix.scale / np.float32(INT8_MOST) if weight.parts["scale"].endswith(".SCB") else matrix.scale
    grid = scale.reshape(-(-matrix_rows(weight) // weight.block[0]), -1)
    return _looked_up(stored, stored.dtype), grid[np.arange(first, last) // weight.block[0]], None


def _packed(matrix: Matrix, first: int, last: int) -> Decoded:
    weight, zeros = matrix.weight, matrix.part("weight_zero_point")
    rows = slice(first, last) if len(matrix.scale) > 1 else slice(1)
    if zeros is not None:  # packed along the rows
        zeros = _looked_up(zeros.T, weight.bits).T[rows]
    values = _looked_up(matrix.rows(first, last), weight.bits)[:, : matrix.shape[-1]]
    return values, matrix.scale[rows], zeros


def _gptq(matrix: Matrix, first: int, last: int) -> Decoded:
    """Words lie along the inputs, so that the transposed matrix is as in other formats."""
    weight, zeros = matrix.weight, matrix.part("qzeros")
    if zeros is not None:
        half, most = 1 << (weight.bits - 1), (1 << weight.bits) - 1
        held = _looked_up(zeros, weight.bits)[:, first:last].T.astype(np.int32) + half
        zeros = (((held + weight.zero_offset) & most) - half).astype(np.float32)
    values = _looked_up(matrix.part("values")[:, first:last].T, weight.bits)
    return values, matrix.scale[:, first:last].T, zeros


def _awq(matrix: Matrix, first: int, last: int) -> Decoded:
    """Words lie along the outputs, their values in an order of their own."""
    per_word = WORD // matrix.weight.bits

    def columns(stored: np.ndarray) -> np.ndarray:
        values = _looked_up(stored[:, first // per_word : -(-last // per_word)], matrix.weight.bits)
        ordered = values.reshape(len(values), -1, per_word)[:, :, AWQ_ORDER]
        return np.asarray(ordered.reshape(len(values), -1).T)

    zeros = matrix.part("qzeros")
    return (
        columns(matrix.part("values")),
        matrix.scale[:, first:last].T,
        None if zeros is None else columns(zeros),
    )


def _nvfp4(matrix: Matrix, first: int, last: int) -> Decoded:
    scale = matrix.scale[first:last]
    if (factor := matrix.part("weight_scale_2")) is not None:
        scale = scale * factor.astype(np.float32).reshape(-1)[:1]
    elif (divisor := matrix.part("weight_global_scale")) is not None:
        scale = scale / divisor.astype(np.float32).reshape(-1)[:1]
    return _looked_up(matrix.rows(first, last), FLOAT4), scale, None


def _mxfp4(matrix: Matrix, first: int, last: int) -> Decoded:
    _, inputs, outputs = matrix.shape
    size = matrix.weight.block[1]
    blocks = slice(first // size, -(-last // size))
    stored = matrix.part("values").reshape(outputs, inputs // size, -1)[:, blocks]
    scale = matrix.scale.reshape(outputs, -1)[:, blocks]
    return _looked_up(stored.reshape(outputs, -1), FLOAT4).T, np.repeat(scale.T, size, axis=0), None


DECODERS = {
    "scaled": _scaled,
    "packed": _packed,
    "gptq": _gptq,
    "awq": _awq,
    "nvfp4": _nvfp4,
    "mxfp4": _mxfp4,
}
"""Scheme -> the function that decodes it; tensors of other schemes are only copied."""


def _looked_up(stored: np.ndarray, kind: np.dtype | int) -> np.ndarray:
    """The values of each row's bytes: `[rows, …]` of any type to `[rows, values]` float32.

    Args:
        kind: as in `_table`.
    """
    table = _table(kind)
    whole = table.view(np.dtype((np.void, table.shape[1] * table.itemsize))).reshape(-1)
    found = np.take(whole, np.ascontiguousarray(stored).view(np.uint8), mode="clip")
    return found.view(np.float32).reshape(len(stored), -1)


@cache
def _table(kind: np.dtype | int) -> np.ndarray:
    """The values of each byte, the lowest bits first: `[256, values]` float32.

    Args:
        kind: type of the values; or the bits of unsigned numbers, less half of their range.
    """
    bits = kind if isinstance(kind, int) else 4 if kind == FLOAT4 else 8
    codes = ((np.arange(256)[:, None] >> np.arange(0, 8, bits)) & ((1 << bits) - 1)).astype(np.uint8)
    values: np.ndarray
    if isinstance(kind, int):
        values = codes.astype(np.float32) - np.float32(1 << (bits - 1))
    else:
        values = codes.view(kind).astype(np.float32)
    return values
