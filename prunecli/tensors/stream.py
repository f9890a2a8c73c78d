"""What an output tensor is made of: the values that a method's `rewrite` returns and the writer carries out.

A tensor that is computed from others is made block by block of rows, a few blocks in memory at a time. A row is one
index of the first axis. Sums are carried out in float64 and rounded once, to the type of the output.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from prunecli.errors import CheckpointError
from prunecli.tensors.copying import write_from
from prunecli.tensors.dtypes import cast, is_float, numpy_dtype, size_of
from prunecli.tensors.reader import TensorInfo, TensorReader

Ranges = tuple[tuple[int, int], ...]
MOST_RANGES = 256
"""Ranges of a tensor that are copied one by one; of more, blocks of rows are put together."""

TILE = 1 << 16
"""Random numbers that are drawn at once; what is drawn depends on it, and on nothing else but the seed."""


@dataclass(frozen=True)
class Copy:
    """A source tensor, or parts of it; cast where the output has another type.

    Attributes:
        source: name of the tensor.
        taken: axes that parts are taken of, ascending, each with index ranges (start, stop) in order; of others all.
    """

    source: str
    taken: tuple[tuple[int, Ranges], ...] = ()


@dataclass(frozen=True)
class Sum:
    """The weighted sum of like tensors, in float64, rounded once: sum_i w x_i.

    Attributes:
        parts: the x_i.
        weight: w; a mean of k has 1/k, a single part is scaled.
    """

    parts: tuple[Expression, ...]
    weight: float


@dataclass(frozen=True)
class Concat:
    """Parts one after another along `axis`."""

    axis: int
    parts: tuple[Expression, ...]


@dataclass(frozen=True)
class Generated:
    """Values that are given, or made as they are written.

    Attributes:
        shape: of all of them.
        rows: (start, stop) -> those rows of the first axis, in floating-point numbers; asked for in any order, several
            times, and by several threads at once.
    """

    shape: tuple[int, ...]
    rows: Callable[[int, int], np.ndarray]


def given(values: np.ndarray) -> Generated:
    """The expression of an array that is held in memory."""
    return Generated(values.shape, lambda start, stop: values[start:stop])


def zeros(shape: tuple[int, ...]) -> Generated:
    """The expression of zeros."""
    return Generated(shape, lambda start, stop: np.zeros((stop - start, *shape[1:]), np.float32))


def noise(shape: tuple[int, ...], std: float, seed: int) -> Generated:
    """The expression of draws from a normal distribution of mean 0; equal for an equal seed.

    Draws are made tile by tile, each from a generator of its own, so that the rows that are asked for do not matter.
    """
    width = math.prod(shape[1:])

    def rows(start: int, stop: int) -> np.ndarray:
        first, last = start * width, stop * width
        tiles = [
            np.random.Generator(np.random.Philox(key=seed, counter=[0, 0, 0, tile])).standard_normal(
                TILE, np.float32
            )
            for tile in range(first // TILE, -(-last // TILE))
        ]
        drawn = np.concatenate(tiles)[first % TILE :][: last - first]
        drawn *= np.float32(std)
        return drawn.reshape(stop - start, *shape[1:])

    return Generated(shape, rows)


Expression = Copy | Sum | Concat | Generated


def sources(expression: Expression) -> Iterator[str]:
    """The tensors that it is made of, in order; one that is used twice comes twice."""
    if isinstance(expression, (Sum, Concat)):
        for part in expression.parts:
            yield from sources(part)
    elif isinstance(expression, Copy):
        yield expression.source


class Output(NamedTuple):  # as `TensorInfo`
    """One tensor of the result: everything about it is known before a byte is read.

    Attributes:
        name: in the result.
        dtype: safetensors type ("F16"); one with a fraction where the expression computes.
        shape: in the result.
        expression: how it is made.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    expression: Expression

    @property
    def info(self) -> TensorInfo:
        """Name, type and shape."""
        return TensorInfo(*self[:3])

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return size_of(self.shape, self.dtype)


def check_expressions(source: TensorReader, outputs: Sequence[Output]) -> None:
    """Check that each output can be made of the tensors of `source`.

    Raises:
        CheckpointError: the source lacks a tensor, or holds whole numbers that would be computed with.
        ValueError: the method that made the outputs is at fault: a name twice, or ranges or a shape that the source
            tensor does not have.
    """
    names = set()
    for output in outputs:
        if output.name in names:
            raise ValueError(f"{output.name} would be written twice")
        names.add(output.name)
        if is_plain_copy(source, output):
            continue
        shape = shape_of(source, output.expression)
        if output.shape != shape:
            raise ValueError(f"{output.name}: shape {list(output.shape)}, its source gives {list(shape)}")
        for name in sources(output.expression):
            dtype, moved = source.info(name).dtype, isinstance(output.expression, Copy)
            if not is_float(dtype) and not (moved and output.dtype == dtype):
                raise CheckpointError(
                    f"{name} is of type {dtype}, which cannot be merged or resized",
                    "Give a checkpoint in float32, bfloat16 or float16.",
                )


def is_plain_copy(source: TensorReader, output: Output) -> bool:
    """Whether it is a tensor of `source` as it is stored, as nearly all are."""
    expression = output.expression
    if not isinstance(expression, Copy) or expression.taken:
        return False
    _, dtype, shape = source.info(expression.source)
    return output.dtype == dtype and output.shape == shape


def shape_of(source: TensorReader, expression: Expression) -> tuple[int, ...]:
    """The shape of what `expression` makes of the tensors of `source`.

    Args:
        source: where its tensors lie.
        expression: what to make.

    Raises:
        CheckpointError: a tensor that the source lacks.
        ValueError: ranges that a source tensor does not have, parts that do not fit together.
    """
    if isinstance(expression, Generated):
        return expression.shape
    if isinstance(expression, Sum):
        (one,) = {shape_of(source, part) for part in expression.parts}
        return one
    if isinstance(expression, Concat):
        axis, shapes = expression.axis, [shape_of(source, part) for part in expression.parts]
        (around,) = {(*shape[:axis], *shape[axis + 1 :]) for shape in shapes}
        return (*around[:axis], sum(shape[axis] for shape in shapes), *around[axis:])
    shape = source.info(expression.source).shape
    for axis, ranges in expression.taken:
        if not 0 <= axis < len(shape) or not all(0 <= a <= b <= shape[axis] for a, b in ranges):
            raise ValueError(f"{expression.source} {list(shape)} lacks some of the ranges")
        shape = (*shape[:axis], sum(b - a for a, b in ranges), *shape[axis + 1 :])
    return shape


def copied_ranges(source: TensorReader, output: Output) -> list[tuple[int, int]] | None:
    """Return the byte ranges (start, stop) of a source tensor that an output is a copy of; None if it is computed."""
    expression = output.expression
    if not isinstance(expression, Copy):
        return None
    info = source.info(expression.source)
    if info.dtype != output.dtype:
        return None
    if not expression.taken:
        return [(0, info.nbytes)]
    (axis, taken), *inner = expression.taken
    ranges = joined(taken)
    if inner or math.prod(info.shape[:axis]) != 1 or (len(ranges) > MOST_RANGES and not source.is_remote):
        return None
    width = info.nbytes // info.shape[axis] if info.shape[axis] else 0
    return [(start * width, stop * width) for start, stop in ranges]


def joined(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges without the empty ones, each that begins where the one before it ends joined to that."""
    runs: list[tuple[int, int]] = []
    for start, stop in ranges:
        if runs and runs[-1][1] == start:
            runs[-1] = runs[-1][0], stop
        elif start < stop:
            runs.append((start, stop))
    return runs


BLOCK_ELEMENTS = 1 << 18
"""Elements of one block, at most (but one row at least): 2 MiB in float64."""

REMOTE_ELEMENTS = 1 << 22
"""Elements of one block of a source elsewhere, where each block is a request."""


@dataclass(frozen=True)
class Block:
    """Rows `start` to `stop` of a computed output, and where they go.

    Attributes:
        source: tensors that the output is made of.
        depth: number of leading axes that a row is an index of.
        target: file descriptor; `target_offset` is a place in its file.
    """

    source: TensorReader
    output: Output
    depth: int
    start: int
    stop: int
    target: int
    target_offset: int

    @property
    def written(self) -> int:
        """Number of bytes that are written."""
        return (self.stop - self.start) * size_of(self.output.shape[self.depth :], self.output.dtype)

    def carry_out(self) -> None:
        """Compute and write. Blocks may be carried out side by side.

        Raises:
            CheckpointError: the source file ends early, or a value cannot be cast.
            OSError: the disk is full, among others.
        """
        output, where = self.output, f"{self.source.path}: {self.output.name}"
        rows = self.start, self.stop, output.dtype, where, self.depth
        made = np.ascontiguousarray(compute(output.expression, self.source, *rows))
        write_from(self.target, self.target_offset, made.reshape(-1).view(np.uint8).data)


def blocks(source: TensorReader, output: Output, target: int, target_offset: int) -> Iterator[Block]:
    """Yield the work of a computed output that begins at `target_offset` of the file `target`.

    Columns are taken, and values cast, in rows of the inner axes alone, so that a stack of matrices is not one row.
    """
    expression, shape, depth = output.expression, output.shape, 1
    if isinstance(expression, Copy):
        depth = max(1, expression.taken[0][0] if expression.taken else len(shape))
    width = size_of(shape[depth:], output.dtype)
    for start, stop in row_blocks(shape, depth, REMOTE_ELEMENTS if source.is_remote else BLOCK_ELEMENTS):
        yield Block(source, output, depth, start, stop, target, target_offset + start * width)


def row_blocks(shape: tuple[int, ...], depth: int = 1, most: int = 0) -> Iterator[tuple[int, int]]:
    """Yield the rows of a tensor as ranges of at most `most` (or `BLOCK_ELEMENTS`) elements; none if it is empty."""
    rows, width = math.prod(shape[:depth]), math.prod(shape[depth:])
    step = max((most or BLOCK_ELEMENTS) // max(width, 1), 1)
    for start in range(0, rows if width else 0, step):
        yield start, min(start + step, rows)


def values(source: TensorReader, expression: Expression) -> Iterator[np.ndarray]:
    """Yield the values of `expression` in float64, in blocks of rows; messages name the first of its sources."""
    where = f"{source.path}: {next(sources(expression), '')}"
    for start, stop in row_blocks(shape_of(source, expression)):
        yield compute(expression, source, start, stop, "F64", where)


def compute(
    expression: Expression,
    source: TensorReader,
    start: int,
    stop: int,
    dtype: str,
    where: str,
    depth: int = 1,
) -> np.ndarray:
    """Return rows `start` to `stop` of what `expression` makes, `[stop - start, ...]` in the safetensors type `dtype`.

    Args:
        depth: number of leading axes that a row is an index of; more than 1 for `Copy` only.

    Raises:
        CheckpointError: a source file ends early, or a value cannot be cast.
    """
    if isinstance(expression, Generated):
        return cast(np.asarray(expression.rows(start, stop)), dtype, where)
    if isinstance(expression, Sum):
        total = None
        for part in expression.parts:
            if isinstance(part, Copy):  # what is no number shows in the sum
                values = _read(source, part, start, stop).astype(np.float64)
            else:
                values = compute(part, source, start, stop, "F64", where)
            if expression.weight != 1:
                values *= expression.weight
            total = values if total is None else np.add(total, values, out=total)
        assert total is not None
        return cast(total, dtype, where)
    if isinstance(expression, Concat):
        if expression.axis:
            parts = [compute(part, source, start, stop, dtype, where) for part in expression.parts]
            return np.concatenate(parts, axis=expression.axis)
        blocks, before = [], 0
        for part in expression.parts:
            rows = shape_of(source, part)[0]
            first, last = max(start - before, 0), min(stop - before, rows)
            if first < last:
                blocks.append(compute(part, source, first, last, dtype, where))
            before += rows
        return np.concatenate(blocks)
    values = _read(source, expression, start, stop, depth)
    return values if source.info(expression.source).dtype == dtype else cast(values, dtype, where)


def _read(source: TensorReader, expression: Copy, start: int, stop: int, depth: int = 1) -> np.ndarray:
    """Return rows `start` to `stop` of the selection of a source tensor, in its own type."""
    rows, taken = np.arange(start, stop), expression.taken
    if taken and not taken[0][0]:
        rows, taken = _indices(taken[0][1])[start:stop], taken[1:]
    low, high = int(rows.min()), int(rows.max()) + 1
    # Those between are read too, and dropped, where they are no more: a read takes longer than half of a block.
    is_dense = not source.is_remote and high - low <= 2 * len(rows)
    runs = [np.arange(low, high)] if is_dense else np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1)
    info = source.info(expression.source)
    width = size_of(info.shape[depth:], info.dtype)
    found = np.empty((sum(map(len, runs)), *info.shape[depth:]), numpy_dtype(info.dtype))
    view, done = found.reshape(-1).view(np.uint8).data, 0
    for run in runs:
        part = view[done : done + len(run) * width]
        source.read_range(info.name, int(run[0]) * width, part)
        done += len(part)
    if is_dense and not np.array_equal(rows, runs[0]):
        found = found.take(rows - low, 0)
    for axis, ranges in taken:
        found = take(found, ranges, axis - depth + 1)
    return found


def take(array: np.ndarray, ranges: Ranges, axis: int) -> np.ndarray:
    """The parts of an array in these index ranges of an axis."""
    if len(ranges) > MOST_RANGES:
        return array.take(_indices(ranges), axis)
    return np.concatenate([array[(slice(None),) * axis + (slice(*own),)] for own in ranges], axis)


@lru_cache(maxsize=64)  # each block of a tensor asks for them
def _indices(ranges: Ranges) -> np.ndarray:
    """The indices that ranges spell out."""
    return np.concatenate([np.arange(0), *(np.arange(first, last) for first, last in ranges)])
