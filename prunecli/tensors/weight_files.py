"""Weight files: which tensors one holds and where their bytes lie, found without reading the values."""

from __future__ import annotations

import os
import pickle
import struct
import tempfile
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from prunecli.errors import CheckpointError, UsageError, reason_of
from prunecli.private import fake_tensors
from prunecli.tensors.dtypes import is_known, parse_dtype
from prunecli.tensors.json_files import parsed, refuse_pointer
from prunecli.tensors.reader import Stored, TensorInfo, WeightFile

if TYPE_CHECKING:
    import torch


MAX_HEADER_BYTES = 100_000_000
"""As in the safetensors library: a longer header is damage."""


def read_header(path: Path) -> WeightFile:
    """The tensors of a .safetensors file, in the order of their bytes; reads the header only.

    Raises:
        CheckpointError: the file is missing, truncated, or its header is not a valid one.
    """
    refuse_pointer(path)
    with path.open("rb") as file:
        return described(
            path, os.fstat(file.fileno()).st_size, lambda start, count: os.pread(file.fileno(), count, start)
        )


def described(path: Path, size: int, read: Callable[[int, int], bytes]) -> WeightFile:
    """The tensors of a .safetensors file, in the order of their bytes.

    Args:
        path: the file, for messages and as that of the result.
        size: its bytes.
        read: gives the bytes from a start on, so many of them; it is asked for those of the header.

    Raises:
        CheckpointError: the file is truncated, or its header is not a valid one.
    """
    header = read(0, 8)
    if len(header) < 8:
        raise _truncated(path, f"{size} bytes")
    (length,) = struct.unpack("<Q", header)
    if length > MAX_HEADER_BYTES:
        raise _damaged(path, f"its header would be {length:,} bytes long")
    if 8 + length > size:
        raise _truncated(path, f"{size:,} bytes, its header alone ends at {8 + length:,}")
    tensors: dict[str, Stored] = {}
    position, previous = 0, "the header"
    try:
        content = parsed(read(8, length), unique=True)
        content.pop("__metadata__", None)
        entries = sorted((entry["data_offsets"], name, entry) for name, entry in content.items())
        for (begin, end), name, entry in entries:
            dtype, shape = entry["dtype"], tuple(entry["shape"])
            is_sized = {*map(type, (begin, end, *shape))} == {int} and min((begin, *shape)) >= 0
            if type(dtype) is not str or not is_sized:
                raise ValueError(f"the entry of {name!r}")
            if not name.isprintable():
                raise _damaged(path, f"{name!r} is no name of a tensor")
            if not is_known(dtype):
                raise CheckpointError(
                    f"{path}: {name} has the type {dtype!r}, which prunecli does not read",
                    "Convert the checkpoint to float32, float16 or bfloat16 first.",
                )
            info = TensorInfo(name, dtype, shape)
            if end - begin != info.nbytes:
                what = f"its shape {list(shape)} in {dtype} needs {info.nbytes:,}"
                raise _damaged(path, f"{name} has {end - begin:,} bytes, {what}")
            if 8 + length + end > size:
                raise _truncated(path, f"{size:,} bytes, {name} ends at {8 + length + end:,}")
            if begin != position:
                raise _damaged(path, f"{name} overlaps {previous}, or unused bytes lie between them")
            tensors[name] = Stored(info, 8 + length + begin)
            position, previous = end, name
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise _damaged(path, f"its header is not of the safetensors form ({reason_of(error)})") from error
    if 8 + length + position != size:
        raise _damaged(path, f"{size - 8 - length - position:,} bytes after the last tensor")
    return WeightFile(path, tensors)


def _truncated(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path}: truncated ({what})", "Download or copy the file again.")


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path}: damaged: {what}", "Download or copy the file again.")


ZIP_MAGIC = b"PK\x03\x04"
OFFSET = "_checkpoint_offset"
"""Attribute of a storage without values: the first byte of its values in the file."""


def read_pickled(path: Path) -> WeightFile:
    """The tensors of a .bin file, in its order.

    Contiguous tensors and contiguous views are read from the file itself, later and piece by piece. Others
    (transposed, expanded) are written row-major into an unnamed temporary file now, one at a time. So are all
    tensors of the format before torch 1.6, which is no zip file: there the whole file passes through memory.

    Raises:
        CheckpointError: the file is missing, truncated, or holds more than tensors.
    """
    refuse_pointer(path)
    with path.open("rb") as file:
        magic = file.read(len(ZIP_MAGIC))
    if magic != ZIP_MAGIC:
        return _spooled(path, _load(path), {})
    described = _load(path, describe=True)
    in_place = {
        name: stored for name, tensor in described.items() if (stored := _in_place(path, name, tensor))
    }
    if len(in_place) == len(described):
        return WeightFile(path, in_place)
    return _spooled(path, _load(path, mmap=True), in_place)


def _load(path: Path, *, describe: bool = False, mmap: bool = False) -> dict[str, torch.Tensor]:
    """What torch.load finds; with `describe`, tensors without values whose storages know their offset in the file."""
    import torch

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if describe:
                loaded = _described(path)
            else:
                loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path}: not a plain file of tensors (torch.load with weights_only=True refuses it)",
            "Files that would run code are not opened; use a .safetensors copy of the checkpoint.",
        ) from error
    except (CheckpointError, MemoryError):
        raise
    except Exception as error:  # a damaged pickle may raise anything
        raise CheckpointError(
            f"{path}: truncated or damaged ({reason_of(error)})", "Download or copy the file again."
        ) from error
    return _state_dict(path, loaded)


def _described(path: Path) -> Any:
    import torch

    with zipfile.ZipFile(path) as archive:
        orders = [archive.read(name) for name in archive.namelist() if name.endswith("/byteorder")]
    if b"big" in orders:
        raise CheckpointError(f"{path}: big-endian values", "Save the checkpoint again on a common machine.")
    loaded = torch.load(path, map_location="meta", weights_only=True)
    values = loaded.values() if isinstance(loaded, dict) else ()
    dense = [one for one in values if isinstance(one, torch.Tensor) and one.layout == torch.strided]
    if all(hasattr(tensor.untyped_storage(), OFFSET) for tensor in dense):
        return loaded
    with fake_tensors():  # an older torch tells offsets here only; slow
        return torch.load(path, map_location="cpu", weights_only=True)


def _state_dict(path: Path, loaded: Any) -> dict[str, torch.Tensor]:
    import torch

    if not isinstance(loaded, dict) or not loaded:
        raise CheckpointError(f"{path}: holds no named tensors but a {type(loaded).__name__}")
    for name, value in loaded.items():
        is_name = isinstance(name, str) and name.isprintable()
        if not is_name or not isinstance(value, torch.Tensor) or value.layout != torch.strided:
            raise CheckpointError(
                f"{path}: the entry {name!r} is no dense tensor but a {type(value).__name__}",
                "Weight files hold a flat mapping from names to tensors; a training checkpoint is not one.",
            )
    return cast("dict[str, torch.Tensor]", loaded)


def _info(path: Path, name: str, tensor: torch.Tensor) -> TensorInfo:
    try:
        return TensorInfo(name, parse_dtype(str(tensor.dtype)), tuple(tensor.shape))
    except UsageError:
        raise CheckpointError(
            f"{path}: {name} has the type {tensor.dtype}, which prunecli does not read"
        ) from None


def _in_place(path: Path, name: str, tensor: torch.Tensor) -> Stored | None:
    """Where a described tensor's values lie in the zip file; None where they are no plain run of bytes."""
    info = _info(path, name, tensor)
    storage = tensor.untyped_storage()
    start: int | None = getattr(storage, OFFSET, None)
    if start is None or not tensor.is_contiguous():
        return None
    shift = int(tensor.storage_offset()) * tensor.element_size()
    end = start + shift + info.nbytes
    if end > path.stat().st_size or (info.nbytes and shift + info.nbytes > storage.nbytes()):
        raise CheckpointError(
            f"{path}: truncated ({name} ends at {end:,})", "Download or copy the file again."
        )
    return Stored(info, start + shift)


def _spooled(path: Path, tensors: dict[str, torch.Tensor], in_place: dict[str, Stored]) -> WeightFile:
    """All tensors of the file; those that are not `in_place` are copied into an unnamed temporary file."""
    import torch

    spool = cast("BinaryIO", tempfile.TemporaryFile(prefix="prunecli-"))  # noqa: SIM115 (the checkpoint closes it)
    stored: dict[str, Stored] = {}
    for name in list(tensors):
        tensor = tensors.pop(name)
        if name in in_place:
            stored[name] = in_place[name]
            continue
        stored[name] = Stored(_info(path, name, tensor), spool.tell(), spooled=True)
        flat = tensor.detach().contiguous().reshape(-1)
        if flat.numel():
            spool.write(flat.view(torch.uint8).numpy().data)
    spool.flush()
    return WeightFile(path, stored, spool)
