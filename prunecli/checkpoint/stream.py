"""What an output tensor is made of: the values that a method's `rewrite` returns and the writer carries out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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


Recipe = Copy | Rows


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
        ValueError: a name twice, rows or a shape that the source tensor does not have, a cast that is not
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
        if output.shape != shape:
            raise ValueError(f"{output.name}: shape {list(output.shape)}, its source gives {list(shape)}")
        if output.dtype != info.dtype and not (is_float(output.dtype) and is_float(info.dtype)):
            raise ValueError(f"{output.name}: no cast from {info.dtype} to {output.dtype}")
        if output.name in names:
            raise ValueError(f"{output.name} would be written twice")
        names.add(output.name)


def byte_ranges(output: Output, info: TensorInfo) -> Iterator[tuple[int, int]]:
    """(first byte, bytes) of the source tensor that the output is made of, in order; neighbouring rows as one."""
    if isinstance(output.recipe, Copy):
        yield 0, info.nbytes
        return
    row_bytes = info.nbytes // info.shape[0] if info.shape[0] else 0
    start = count = 0
    for row in output.recipe.rows:
        if row == start + count:
            count += 1
            continue
        if count:
            yield start * row_bytes, count * row_bytes
        start, count = row, 1
    if count:
        yield start * row_bytes, count * row_bytes
