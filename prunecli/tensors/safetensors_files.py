"""Headers of .safetensors files, checked strictly: eight bytes of length, JSON, tensors without gaps."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prunecli.errors import CheckpointError, reason_of
from prunecli.tensors.dtypes import is_known
from prunecli.tensors.git_lfs import refuse_pointer
from prunecli.tensors.json_files import parsed
from prunecli.tensors.reader import Stored, TensorInfo, WeightFile

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
    entries = _parse(path, read(8, length))
    places = [
        _entry(path, name, value, 8 + length) for name, value in entries.items() if name != "__metadata__"
    ]
    places.sort()
    _check_layout(path, places, 8 + length, size)
    return WeightFile(path, {stored.info.name: stored for _, _, stored in places})


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    try:
        entries = parsed(text, unique=True)
    except ValueError as error:
        raise _damaged(path, f"its header cannot be read ({reason_of(error)})") from error
    if not isinstance(entries, dict):
        raise _damaged(path, "its header is not an object")
    return entries


def _entry(path: Path, name: str, value: Any, start: int) -> tuple[int, int, Stored]:
    """The bytes of the file that a tensor takes, as start and stop, and what it is."""
    if not name.isprintable():
        raise _damaged(path, f"{name!r} is no name of a tensor")
    try:
        dtype, shape, (begin, end) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(path, f"the entry of {name} is not of the safetensors form") from error
    for number in (*shape, begin, end):
        if type(number) is not int or number < 0:
            raise _damaged(
                path, f"{name} has a shape or offset that is not a count: {list(shape)}, {begin}, {end}"
            )
    if not isinstance(dtype, str) or not is_known(dtype):
        raise CheckpointError(
            f"{path}: {name} has the type {dtype!r}, which prunecli does not read",
            "Convert the checkpoint to float32, float16 or bfloat16 first.",
        )
    info = TensorInfo(name, dtype, shape)
    if end - begin != info.nbytes:
        raise _damaged(
            path,
            f"{name} has {end - begin:,} bytes, its shape {list(shape)} in {dtype} needs {info.nbytes:,}",
        )
    return start + begin, start + end, Stored(info, start + begin)


def _check_layout(path: Path, places: list[tuple[int, int, Stored]], start: int, size: int) -> None:
    """The tensors must cover the bytes from `start` to the end of the file without gap or overlap."""
    position, previous = start, "the header"
    for begin, end, stored in places:
        name = stored.info.name
        if end > size:
            raise _truncated(path, f"{size:,} bytes, {name} ends at {end:,}")
        if begin != position:
            raise _damaged(path, f"{name} overlaps {previous}, or unused bytes lie between them")
        position, previous = end, name
    if position != size:
        raise _damaged(path, f"{size - position:,} bytes after the last tensor")


def _truncated(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path}: truncated ({what})", "Download or copy the file again.")


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path}: damaged: {what}", "Download or copy the file again.")
