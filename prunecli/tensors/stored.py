"""What is known of a stored tensor without reading it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

from prunecli.tensors.dtypes import is_float, itemsize


@dataclass(frozen=True)
class TensorInfo:
    """A tensor's name, safetensors type ("F16") and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a scalar."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return self.numel * itemsize(self.dtype)

    def cast(self, target: str | None) -> TensorInfo:
        """The same tensor with floating-point values in the type `target`; None, and what is not one: as it is."""
        return self if target is None or not is_float(self.dtype) else replace(self, dtype=target)


@dataclass(frozen=True)
class Stored:
    """A tensor and the place of its bytes: `info.nbytes` from `offset`, row-major, little-endian.

    `spooled` says that they lie in the file's spool instead of the file itself.
    """

    info: TensorInfo
    offset: int
    spooled: bool = False


@dataclass(frozen=True)
class WeightFile:
    """One weight file.

    Attributes:
        path: the file.
        tensors: those that it holds, in file order.
        spool: an unnamed temporary file with the values that do not lie in the file as plain row-major bytes.
    """

    path: Path
    tensors: Mapping[str, Stored]
    spool: BinaryIO | None = field(default=None, compare=False)
