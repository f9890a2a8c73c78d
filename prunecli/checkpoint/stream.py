"""What an output tensor is made of: the values that a method's `rewrite` returns and the writer carries out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prunecli.checkpoint.dtypes import is_float
from prunecli.checkpoint.tensors import TensorInfo

if TYPE_CHECKING:
    from prunecli.checkpoint.reader import Checkpoint


@dataclass(frozen=True)
class Copy:
    """All of a source tensor; cast where the output has another type."""

    source: str


@dataclass(frozen=True)
class Rows:
    """Rows of a source tensor's first axis, in the given order."""

    source: str
    rows: tuple[int, ...]


@dataclass(frozen=True)
class Slices:
    """Parts of a source tensor along one axis: the index ranges (start, stop), in order."""

    source: str
    axis: int
    ranges: tuple[tuple[int, int], ...]


Recipe = Copy | Rows | Slices


@dataclass(frozen=True)
class Output:
    """One tensor of the result: everything about it is known before a byte is read.

    Attributes:
        name: in the result.
        dtype: safetensors type ("F16").
        shape: in the result.
        recipe: how it is made.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    recipe: Recipe

    @property
    def info(self) -> TensorInfo:
        """Name, type and shape."""
        return TensorInfo(self.name, self.dtype, self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return self.info.nbytes


def check_outputs(source: Checkpoint, outputs: Sequence[Output]) -> None:
    """Whether each output can be made of what `source` holds.

    Raises:
        CheckpointError: a tensor that the source lacks.
        ValueError: a name twice, rows, ranges or a shape that the source tensor does not have, a cast that is not
            between floating-point types: a fault of the method that made the outputs.
    """
    names: set[str] = set()
    for output in outputs:
        info = source.info(output.recipe.source)
        shape = info.shape
        if isinstance(output.recipe, Rows):
            if not shape or not all(0 <= row < shape[0] for row in output.recipe.rows):
                raise ValueError(f"{output.name}: {info.name} {list(shape)} lacks some of the rows")
            shape = (len(output.recipe.rows), *shape[1:])
        if isinstance(output.recipe, Slices):
            shape = _sliced(shape, output.recipe, output.name)
        if output.shape != shape:
            raise ValueError(f"{output.name}: shape {list(output.shape)}, its source gives {list(shape)}")
        if output.dtype != info.dtype and not (is_float(output.dtype) and is_float(info.dtype)):
            raise ValueError(f"{output.name}: no cast from {info.dtype} to {output.dtype}")
        if output.name in names:
            raise ValueError(f"{output.name} would be written twice")
        names.add(output.name)


def _sliced(shape: tuple[int, ...], recipe: Slices, name: str) -> tuple[int, ...]:
    axis = recipe.axis
    if not 0 <= axis < len(shape) or not all(0 <= a <= b <= shape[axis] for a, b in recipe.ranges):
        raise ValueError(f"{name}: {recipe.source} {list(shape)} lacks some of the ranges")
    return (*shape[:axis], sum(b - a for a, b in recipe.ranges), *shape[axis + 1 :])


@dataclass(frozen=True)
class Piece:
    """Bytes of a source tensor that an output is made of.

    Attributes:
        start: first byte.
        nbytes: how many.
        row_bytes: of a row, where only parts of each row are taken; else 0.
        picks: those parts, as (start, stop) bytes of a row; empty: all.
    """

    start: int
    nbytes: int
    row_bytes: int = 0
    picks: tuple[tuple[int, int], ...] = ()


def pieces(output: Output, info: TensorInfo) -> Iterator[Piece]:
    """What the output is made of, in order; neighbours as one."""
    recipe = output.recipe
    if isinstance(recipe, Copy):
        yield Piece(0, info.nbytes)
        return
    if isinstance(recipe, Rows):
        axis, ranges = 0, joined((row, row + 1) for row in recipe.rows)
    else:
        axis, ranges = recipe.axis, joined(recipe.ranges)
    rows = math.prod(info.shape[:axis])
    row_bytes = info.nbytes // rows if rows else 0
    inner = row_bytes // info.shape[axis] if info.shape[axis] else 0  # bytes of one index
    picks = tuple((start * inner, stop * inner) for start, stop in ranges)
    if rows == 1:
        yield from (Piece(start, stop - start) for start, stop in picks)
    elif picks:
        yield Piece(0, info.nbytes, row_bytes, picks)


def joined(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges without the empty ones, each that begins where the one before it ends joined to that."""
    found: list[tuple[int, int]] = []
    for start, stop in ranges:
        if found and found[-1][1] == start:
            found[-1] = found[-1][0], stop
        elif start < stop:
            found.append((start, stop))
    return found
