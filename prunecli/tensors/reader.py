"""The named tensors of a checkpoint directory's weight files, read piece by piece.

Bytes come through `pread`, never through a memory map, so that resident memory is what a caller asks for; those of a
file that is elsewhere come from its `RangeSource`.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO, NamedTuple, Protocol, Self

import numpy as np

from prunecli.errors import CheckpointError
from prunecli.tensors.dtypes import is_float, numpy_dtype, size_of

Fill = Callable[[memoryview], None]
"""Fills a buffer with the bytes that come next."""


class RangeSource(Protocol):
    """A weight file that is not on this machine."""

    def reading(self, offset: int, nbytes: int) -> Fill:
        """Return a function that fills buffers with the next of `nbytes` from `offset` on, in few requests."""


Handle = int | RangeSource
"""A file to read from: a descriptor, or what stands for one."""


class TensorInfo(NamedTuple):  # made in half the time of a frozen dataclass: there may be tens of thousands
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
        return size_of(self.shape, self.dtype)

    def cast(self, target: str | None) -> TensorInfo:
        """Return the tensor with the floating-point type `target`; unchanged if that is None or values are integers."""
        return self if target is None or not is_float(self.dtype) else self._replace(dtype=target)


class Stored(NamedTuple):
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


class Closing:
    """Closes itself after a `with` block."""

    def close(self) -> None:
        """Give back what it holds."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


class TensorReader(Closing):
    """Tensors of some files, under the names that a subclass gives them.

    Attributes:
        path: the directory.
        files: the weight files.
        tensors: what they hold, in file order.
        is_local: whether the tensors can be read.
        is_remote: whether some bytes come from elsewhere, so that few large requests are better than many small ones.
    """

    is_local = True
    is_remote = False

    def __init__(self, path: Path, files: tuple[WeightFile, ...]) -> None:
        self.path = path
        self.files = tuple(file.path for file in files)
        self._descriptors: dict[int, int] = {}
        self._opening = threading.Lock()
        self._files = files
        self._stored = self._named()
        self.tensors = MappingProxyType(
            {
                name: stored.info if stored.info.name == name else stored.info._replace(name=name)
                for name, (_, stored) in self._stored.items()
            }
        )

    def _named(self) -> dict[str, tuple[int, Stored]]:
        """The tensors by name: (file number, where its bytes lie)."""
        return self._by_stored_name

    def file_bytes(self, path: Path) -> int:
        """The size of one of `files`."""
        return path.stat().st_size

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(info.nbytes for info in self.tensors.values())

    @property
    def total_parameters(self) -> int:
        """Values of all tensors."""
        return sum(info.numel for info in self.tensors.values())

    def info(self, name: str) -> TensorInfo:
        """Return type and shape of a tensor.

        Raises:
            CheckpointError: there is none of this name.
        """
        if name not in self.tensors:
            raise CheckpointError(f"{self.path}: holds no tensor {name}")
        return self.tensors[name]

    def stored_bytes(self, name: str) -> int:
        """Bytes in the files that its values are made of.

        Raises:
            CheckpointError: there is none of this name.
        """
        return self.info(name).nbytes

    def read(self, name: str) -> np.ndarray:
        """The whole tensor, `[*info.shape]`; bfloat16 and float8 as types of ml_dtypes.

        Raises:
            CheckpointError: as `read_range`.
        """
        info = self.info(name)
        values = np.empty(info.shape, dtype=numpy_dtype(info.dtype))
        if info.nbytes:
            self.read_range(name, 0, values.reshape(-1).view(np.uint8).data)
        return values

    def read_range(self, name: str, start: int, buffer: memoryview | bytearray) -> memoryview:
        """The bytes of a tensor from `start` on, which fill `buffer`; a view of the buffer.

        Raises:
            CheckpointError: no such tensor, or the file ends early.
        """
        descriptor, offset, nbytes = self.location(name)
        view = memoryview(buffer).cast("B")
        if not 0 <= start <= nbytes - len(view):
            raise ValueError(f"{name} has {nbytes} bytes; {start} to {start + len(view)} were asked for")
        try:
            read_into(descriptor, offset + start, view)
        except EOFError:
            file = self.files[self._stored[name][0]]
            raise CheckpointError(f"{file}: truncated while it was read ({name})") from None
        return view

    def location(self, name: str) -> tuple[Handle, int, int]:
        """Return the place of a tensor's bytes: (file, offset, bytes). The checkpoint owns the file.

        Raises:
            CheckpointError: no such tensor.
        """
        if name not in self._stored:
            self.info(name)  # says why
        index, stored = self._stored[name]
        return self._descriptor(index, stored.spooled), stored.offset, stored.info.nbytes

    def close(self) -> None:
        """Close its files; reading opens them again, temporary copies excepted."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()
        for file in self._files:
            if file.spool is not None:
                file.spool.close()

    def __del__(self) -> None:
        if hasattr(self, "_files"):
            self.close()

    def _descriptor(self, index: int, spooled: bool) -> Handle:
        file = self._files[index]
        if spooled and file.spool is not None:
            return file.spool.fileno()
        with self._opening:
            if index not in self._descriptors:
                try:
                    self._descriptors[index] = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
                except FileNotFoundError as error:
                    raise CheckpointError(
                        f"{file.path}: {error.strerror}", "It was there when the checkpoint was opened."
                    ) from error
            return self._descriptors[index]

    @cached_property
    def _by_stored_name(self) -> dict[str, tuple[int, Stored]]:
        """Every tensor under its name in the files; of a name in two files the last, as transformers reads them."""
        return {
            name: (index, stored)
            for index, file in enumerate(self._files)
            for name, stored in file.tensors.items()
        }


def reading(file: Handle, offset: int, nbytes: int) -> Fill:
    """Return a function that fills buffers with the next of `nbytes` of a file from `offset` on.

    Raises:
        EOFError: (by what it returns) the file ends before.
        HubError: (by what it returns) they cannot be had.
    """
    if not isinstance(file, int):
        return file.reading(offset, nbytes)
    descriptor = file

    def fill(view: memoryview) -> None:
        nonlocal offset
        while len(view):
            count = os.preadv(descriptor, [view], offset)
            if count == 0:
                raise EOFError
            view, offset = view[count:], offset + count

    return fill


def bytes_of(file: Handle, offset: int, nbytes: int) -> bytes:
    """The `nbytes` of a file from `offset` on.

    Raises:
        EOFError, HubError: as `read_into`.
    """
    data = bytearray(nbytes)
    read_into(file, offset, memoryview(data))
    return bytes(data)


def read_into(file: Handle, offset: int, view: memoryview) -> None:
    """Fill `view` with the bytes of a file from `offset` on.

    Raises:
        EOFError: the file ends before.
        HubError: they cannot be had.
    """
    reading(file, offset, len(view))(view)
