"""Writes safetensors files as a stream: sizes are known beforehand, one chunk is in memory at a time."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from prunecli.checkpoint.dtypes import is_float, itemsize, numpy_dtype
from prunecli.checkpoint.reader import Checkpoint
from prunecli.checkpoint.stream import Copy, Output
from prunecli.errors import CheckpointError
from prunecli.progress import Progress, silent

CHUNK_BYTES = 16 << 20
SHARD_BYTES = 5_000_000_000
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


@dataclass(frozen=True)
class Piece:
    """Bytes of a source tensor that stand together: `nbytes` from `start`, in elements of `source_dtype`."""

    source: str
    start: int
    nbytes: int


def write_tensors(
    source: Checkpoint,
    outputs: Sequence[Output],
    directory: Path,
    *,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress = silent,
) -> dict[str, str]:
    """Write `outputs` into `directory`: one file, or shards of at most `shard_bytes` with an index.

    Equal types are copied by the kernel; others are cast chunk by chunk, rounded to nearest even.

    Returns:
        Tensor's name -> file.

    Raises:
        CheckpointError: a source tensor is missing or cut short, or a finite value overflows the new type.
        OSError: the disk is full, among others.
    """
    shards = _shards(outputs, shard_bytes)
    names = _file_names(len(shards))
    placed: dict[str, str] = {}
    with progress("writing", sum(output.nbytes for output in outputs), "bytes") as advance:
        for file, shard in zip(names, shards, strict=True):
            _write_shard(source, shard, directory / file, advance)
            placed.update((output.name, file) for output in shard)
    if len(shards) > 1:
        total = sum(output.nbytes for output in outputs)
        parameters = sum(output.info.numel for output in outputs)
        index = {
            "metadata": {"total_parameters": parameters, "total_size": total},
            "weight_map": dict(sorted(placed.items())),
        }
        (directory / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return placed


def _shards(outputs: Sequence[Output], shard_bytes: int) -> list[list[Output]]:
    """Cut in order; a shard is over the limit only where one tensor is."""
    shards: list[list[Output]] = [[]]
    held = 0
    for output in outputs:
        if shards[-1] and held + output.nbytes > shard_bytes:
            shards.append([])
            held = 0
        shards[-1].append(output)
        held += output.nbytes
    return shards


def _file_names(count: int) -> list[str]:
    if count == 1:
        return [SINGLE_FILE]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def _write_shard(
    source: Checkpoint, shard: Sequence[Output], path: Path, advance: Callable[[float], None]
) -> None:
    # Wide types first, as the safetensors library does: every tensor is then aligned to its type.
    ordered = sorted(shard, key=lambda output: -itemsize(output.dtype))
    with path.open("wb", buffering=0) as file:
        _write_all(file.fileno(), memoryview(header_bytes(ordered)))
        buffer = memoryview(bytearray(CHUNK_BYTES))
        pending = _Run(source, file.fileno(), advance)
        for output in ordered:
            info = source.info(output.recipe.source)
            same = info.dtype == output.dtype
            for piece in _pieces(output, info.shape, info.dtype):
                if same:
                    pending.add(piece)
                else:
                    pending.flush()
                    _cast(source, piece, output, file.fileno(), buffer)
                    advance(piece.nbytes // itemsize(info.dtype) * itemsize(output.dtype))
        pending.flush()


def header_bytes(outputs: Sequence[Output]) -> bytes:
    """The length and the JSON that a safetensors file of these tensors begins with, padded to 8 bytes."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for output in outputs:
        end = offset + output.nbytes
        header[output.name] = {
            "dtype": output.dtype,
            "shape": list(output.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _pieces(output: Output, shape: tuple[int, ...], dtype: str) -> Iterator[Piece]:
    """The bytes of its source that the output is made of, in order; neighbouring rows as one piece."""
    whole = itemsize(dtype) * int(np.prod(shape, dtype=np.int64))
    if isinstance(output.recipe, Copy):
        yield Piece(output.recipe.source, 0, whole)
        return
    row_bytes = whole // shape[0] if shape[0] else 0
    start, count = 0, 0
    for row in output.recipe.rows:
        if count and row == start + count:
            count += 1
            continue
        if count:
            yield Piece(output.recipe.source, start * row_bytes, count * row_bytes)
        start, count = row, 1
    if count:
        yield Piece(output.recipe.source, start * row_bytes, count * row_bytes)


class _Run:
    """Pieces that follow each other in the source file, copied at once."""

    def __init__(self, source: Checkpoint, target: int, advance: Callable[[float], None]) -> None:
        self._source, self._target, self._advance = source, target, advance
        self._file = self._start = self._end = -1

    def add(self, piece: Piece) -> None:
        file, offset, _ = self._source.location(piece.source)
        start = offset + piece.start
        if file != self._file or start != self._end:
            self.flush()
            self._file = file
            self._start = start
        self._end = start + piece.nbytes

    def flush(self) -> None:
        while self._start < self._end:
            count = _copy(self._file, self._target, self._start, min(self._end - self._start, CHUNK_BYTES))
            if count == 0:
                raise CheckpointError(
                    f"{self._source.path}: a weight file ended early while it was copied",
                    "Download or copy it again.",
                )
            self._start += count
            self._advance(count)
        self._file = self._start = self._end = -1


_NO_KERNEL_COPY = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}


def _copy(source: int, target: int, offset: int, count: int) -> int:
    """Copy up to `count` bytes to the end of `target`, in the kernel where it can; 0 at the source's end."""
    if hasattr(os, "copy_file_range"):
        try:
            return os.copy_file_range(source, target, count, offset_src=offset)
        except OSError as error:
            if error.errno not in _NO_KERNEL_COPY:
                raise
    data = os.pread(source, count, offset)
    _write_all(target, memoryview(data))
    return len(data)


def _write_all(target: int, data: memoryview) -> None:
    while data:
        data = data[os.write(target, data) :]


def _cast(source: Checkpoint, piece: Piece, output: Output, target: int, buffer: memoryview) -> None:
    """Write the piece in the output's type, one buffer at a time."""
    wanted, given = numpy_dtype(output.dtype), numpy_dtype(source.info(piece.source).dtype)
    for start in range(piece.start, piece.start + piece.nbytes, len(buffer)):
        end = min(start + len(buffer), piece.start + piece.nbytes)
        values = np.frombuffer(source.read_range(piece.source, start, end, buffer), dtype=given)
        with np.errstate(over="ignore", invalid="ignore"):
            cast = values.astype(wanted)
        if is_float(output.dtype):
            _check_overflow(source, piece.source, values, cast, output.dtype)
        _write_all(target, cast.view(np.uint8).data)


def _check_overflow(source: Checkpoint, name: str, values: np.ndarray, cast: np.ndarray, dtype: str) -> None:
    lost = np.isfinite(values) & ~np.isfinite(cast)
    if lost.any():
        worst = float(np.abs(values[lost].astype(np.float64)).max())
        raise CheckpointError(
            f"{source.path}: {name} holds {worst:g}, too large for {dtype}", "Choose bfloat16 or float32."
        )
