"""What an output tensor is made of: the values that a method's `rewrite` returns and the writer carries out."""

from __future__ import annotations

from dataclasses import dataclass

from prunecli.checkpoint.tensors import TensorInfo


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
