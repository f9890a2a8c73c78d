"""`open_checkpoint`: a directory of tensors, described from headers and read piece by piece.

Bytes come through `pread`, never through a memory map, so that resident memory is what a caller asks for.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

import numpy as np

from prunecli.architectures import FAMILIES, REDUCED_PREFIX, Architecture
from prunecli.checkpoint.directory import find_weights, read_config
from prunecli.checkpoint.dtypes import numpy_dtype
from prunecli.checkpoint.embedding import ties
from prunecli.checkpoint.hub.fetch import local_directory
from prunecli.checkpoint.names import same_values, stored_names
from prunecli.checkpoint.side_files import SideFiles, side_files
from prunecli.checkpoint.structure import KEY, Structure
from prunecli.checkpoint.tensors import Stored, TensorInfo, WeightFile
from prunecli.errors import CheckpointError, UnsupportedModelError

__all__ = ["Checkpoint", "TensorInfo", "open_checkpoint"]


class Checkpoint:
    """An open checkpoint directory; a context manager. Nothing is read but what is asked for.

    Attributes:
        path: the directory.
        config: config.json.
        structure: what was removed from the original model.
        architecture: the declared family, or None.
        tensors: what the checkpoint holds, in file order, under the names of the family's stock layout; tied
            aliases and buffers are left out.
        files: the weight files.
    """

    def __init__(self, path: Path, config: dict[str, Any], files: tuple[WeightFile, ...]) -> None:
        self.path = path
        self.config = config
        self.structure = Structure() if config.get(KEY) is None else _structure(path, config)
        self.architecture = FAMILIES.get(str(config.get("model_type")).removeprefix(REDUCED_PREFIX))
        self.files = tuple(file.path for file in files)
        self._descriptors: dict[tuple[int, bool], int] = {}
        self._files = files
        self._stored = self._named()
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(
            {
                name: TensorInfo(name, place.info.dtype, place.info.shape)
                for name, (_, place) in self._stored.items()
            }
        )

    @property
    def is_local(self) -> bool:
        """Whether its tensors can be read."""
        return True

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

    @property
    def model_type(self) -> str:
        """As in config.json."""
        return str(self.config.get("model_type"))

    @cached_property
    def side_files(self) -> SideFiles:
        """Every other file that belongs to the checkpoint, and what lies beside it and does not."""
        return side_files(self.path, self.files)

    @cached_property
    def fingerprint(self) -> str:
        """See `prunecli.checkpoint.fingerprint`."""
        from prunecli.checkpoint.fingerprint import fingerprint

        return fingerprint(self)

    def require_architecture(self) -> Architecture:
        """The declared family.

        Raises:
            UnsupportedModelError: the family is not declared.
        """
        if self.architecture is None:
            raise UnsupportedModelError(
                f'{self.path}: the model family "{self.model_type}" is not supported{self._resembles()}',
                f"inspect, evaluate and bench-latency work all the same. Supported: {', '.join(FAMILIES)}.",
            )
        return self.architecture

    def _resembles(self) -> str:
        """What an undeclared family has in common with a declared one."""
        from prunecli.checkpoint.undeclared import nearest_family, text_type

        if (inner := text_type(self.config)) in FAMILIES:
            return f": it holds a {inner} beside other parts, which is supported only on its own"
        near = nearest_family(self.tensors)
        return f" (its layers resemble those of {near}, which is)" if near else ""

    def info(self, name: str) -> TensorInfo:
        """What is known of one tensor.

        Raises:
            CheckpointError: there is none of this name.
        """
        try:
            return self.tensors[name]
        except KeyError:
            raise CheckpointError(f"{self.path}: holds no tensor {name}") from None

    def read(self, name: str) -> np.ndarray:
        """The whole tensor; bfloat16 and float8 as types of ml_dtypes."""
        info = self.info(name)
        values = np.empty(info.shape, dtype=numpy_dtype(info.dtype))
        if info.nbytes:
            self.read_range(name, 0, info.nbytes, values.reshape(-1).view(np.uint8).data)
        return values

    def read_range(
        self, name: str, start_byte: int, end_byte: int, buffer: memoryview | bytearray
    ) -> memoryview:
        """Bytes `start_byte` to `end_byte` of a tensor, read into the beginning of `buffer`.

        Returns:
            The part of `buffer` that was filled.

        Raises:
            CheckpointError: no such tensor, or the file ends early.
        """
        descriptor, offset, nbytes = self.location(name)
        if not 0 <= start_byte <= end_byte <= nbytes:
            raise ValueError(f"{name} has {nbytes} bytes; {start_byte} to {end_byte} were asked for")
        view = memoryview(buffer).cast("B")[: end_byte - start_byte]
        done = 0
        while done < len(view):
            count = os.preadv(descriptor, [view[done:]], offset + start_byte + done)
            if count == 0:
                raise CheckpointError(f"{self._file_of(name)}: truncated while it was read ({name})")
            done += count
        return view

    def location(self, name: str) -> tuple[int, int, int]:
        """Where a tensor's bytes lie: (file descriptor, offset, bytes). The checkpoint owns the descriptor.

        Raises:
            CheckpointError: no such tensor.
        """
        self.info(name)
        index, stored = self._stored[name]
        return self._descriptor(index, stored.spooled), stored.offset, stored.info.nbytes

    def close(self) -> None:
        """Close its files; reading opens them again, temporary copies excepted."""
        for (_, spooled), descriptor in self._descriptors.items():
            if not spooled:
                os.close(descriptor)
        self._descriptors.clear()
        for file in self._files:
            if file.spool is not None:
                file.spool.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_files"):
            self.close()

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.path)!r}, {self.model_type}, {len(self.tensors)} tensors)"

    def _file_of(self, name: str) -> Path:
        return self.files[self._stored[name][0]]

    def _descriptor(self, index: int, spooled: bool) -> int:
        key = index, spooled
        if key not in self._descriptors:
            file = self._files[index]
            if spooled and file.spool is not None:
                self._descriptors[key] = file.spool.fileno()
            else:
                self._descriptors[key] = _open(file.path)
        return self._descriptors[key]

    def _named(self) -> dict[str, tuple[int, Stored]]:
        """Tensors under their stock names, without buffers and tied aliases: name -> (file number, place)."""
        found = self._found
        if self.architecture is None:
            return found

        try:
            tied = ties(self.architecture, self.config, self.structure)
        except CheckpointError as error:
            raise CheckpointError(f"{self.path}: {error.message}", error.remedy) from error
        named = stored_names(self.architecture, tied, list(found), self._equal)
        return {new: found[old] for old, new in named.items()}

    @cached_property
    def _found(self) -> dict[str, tuple[int, Stored]]:
        """Every tensor under its name in the files -> (file number, place)."""
        found: dict[str, tuple[int, Stored]] = {}
        for index, file in enumerate(self._files):
            for name, stored in file.tensors.items():
                found.setdefault(name, (index, stored))
        return found

    def _equal(self, one: str, other: str) -> bool:
        """Whether two tensors of the files hold the same values."""
        (first, a), (second, b) = self._found[one], self._found[other]
        return same_values((self._descriptor(first, a.spooled), a), (self._descriptor(second, b.spooled), b))


def open_checkpoint(path: Path | str) -> Checkpoint:
    """Open a checkpoint: config.json and .safetensors or .bin files, single or sharded.

    Args:
        path: its directory, or a model of the hub, as `org/name` or `org/name@revision`.

    Raises:
        CheckpointError: no such directory, not a checkpoint, or a file that is missing or damaged.
        HubError: a model of the hub that cannot be had.
    """
    directory = local_directory(path)
    config = read_config(directory)
    return Checkpoint(directory, config, find_weights(directory))


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path}: {error.strerror}", "It was there when the checkpoint was opened."
        ) from error


def _structure(path: Path, config: dict[str, Any]) -> Structure:
    return Structure.from_json(config[KEY], str(path / "config.json"))
