"""Makes output tensors that are computed from others: block by block of rows, a few blocks in memory at a time.

A row is one index of the first axis. Sums are carried out in float64 and rounded once, to the type of the output.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from prunecli.tensors.copying import write_from
from prunecli.tensors.dtypes import cast, numpy_dtype, size_of
from prunecli.tensors.reader import TensorReader
from prunecli.tensors.stream import (
    MOST_RANGES,
    Concat,
    Copy,
    Expression,
    Generated,
    Output,
    Ranges,
    Sum,
    joined,
    shape_of,
    sources,
)

BLOCK_ELEMENTS = 1 << 18
"""Elements of one block, at most (but one row at least): 2 MiB in float64."""

REMOTE_ELEMENTS = 1 << 22
"""The same of a source elsewhere, where each block is a request."""


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

    def carry_out(self) -> int:
        """Compute and write; return the number of bytes. Blocks may be carried out side by side.

        Raises:
            CheckpointError: the source file ends early, or a value cannot be cast.
            OSError: the disk is full, among others.
        """
        output, where = self.output, f"{self.source.path}: {self.output.name}"
        rows = self.start, self.stop, output.dtype, where, self.depth
        made = np.ascontiguousarray(compute(output.expression, self.source, *rows))
        write_from(self.target, self.target_offset, made.reshape(-1).view(np.uint8).data)
        return made.nbytes


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


def values(source: TensorReader, expression: Expression, dtype: str = "F32") -> Iterator[np.ndarray]:
    """Yield the values of `expression` in blocks of rows; messages name the first of its sources."""
    where = f"{source.path}: {next(sources(expression), '')}"
    for start, stop in row_blocks(shape_of(source, expression, "values")):
        yield compute(expression, source, start, stop, dtype, where)


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
            rows = shape_of(source, part, where)[0]
            first, last = max(start - before, 0), min(stop - before, rows)
            if first < last:
                blocks.append(compute(part, source, first, last, dtype, where))
            before += rows
        return np.concatenate(blocks)
    values = _read(source, expression, start, stop, depth)
    return values if source.info(expression.source).dtype == dtype else cast(values, dtype, where)


def _read(source: TensorReader, expression: Copy, start: int, stop: int, depth: int = 1) -> np.ndarray:
    """Return rows `start` to `stop` of the selection of a source tensor, in its own type."""
    rows: Iterable[tuple[int, int]] = [(start, stop)]
    taken = expression.taken
    if taken and not taken[0][0]:
        rows, taken = _cut(taken[0][1], start, stop), taken[1:]
    found = _rows_read(source, expression.source, rows, depth)
    for axis, ranges in taken:
        found = take(found, ranges, axis - depth + 1)
    return found


def take(array: np.ndarray, ranges: Ranges, axis: int) -> np.ndarray:
    """The parts of an array in these index ranges of an axis."""
    if len(ranges) > MOST_RANGES:
        return array.take(np.concatenate([np.arange(first, last) for first, last in ranges]), axis)
    return np.concatenate([array[(slice(None),) * axis + (slice(*own),)] for own in ranges], axis)


def _cut(ranges: Iterable[tuple[int, int]], start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of the indices `start` to `stop` in the list of indices that `ranges` spell out."""
    before = 0
    for first, last in ranges:
        low, high = max(start - before, 0), min(stop - before, last - first)
        if low < high:
            yield first + low, first + high
        before += last - first


def _rows_read(source: TensorReader, name: str, ranges: Iterable[tuple[int, int]], depth: int) -> np.ndarray:
    """Return these ranges of rows of a tensor, one after another."""
    info, ranges = source.info(name), joined(ranges)
    width = size_of(info.shape[depth:], info.dtype)
    rows = sum(last - first for first, last in ranges)
    values = np.empty((rows, *info.shape[depth:]), numpy_dtype(info.dtype))
    view, done = values.reshape(-1).view(np.uint8).data, 0
    for first, last in ranges:
        done += len(source.read_range(name, first * width, last * width, view[done:]))
    return values
