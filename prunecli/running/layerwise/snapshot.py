"""The batches' states in a file, so that an interrupted run goes on from its last finished layer.

The file holds the length of a JSON header (8 bytes, little-endian), the header, and the tensors one after another.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from prunecli.running.layerwise.states import StateStore, Stored
from prunecli.running.layerwise.trees import leaves, outline, rebuilt

CHUNK_BYTES = 16 << 20
LEAVES = (Stored, torch.Tensor)


def write_snapshot(path: Path, header: Mapping[str, Any], tree: Any, states: StateStore) -> bool:
    """Replace `path` at once by `header` (JSON) and the tensors of `tree`; False where the disk has no room for both.

    Args:
        tree: of `Stored`, all of them in `states`, and of tensors on the CPU.
    """
    held = leaves(tree, LEAVES)
    text = json.dumps(
        {
            "header": dict(header),
            "tree": outline(tree, LEAVES),
            "tensors": [
                [list(one.shape), str(one.dtype).removeprefix("torch."), isinstance(one, Stored)]
                for one in held
            ],
        }
    ).encode()
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        if shutil.disk_usage(path.parent).free < 2 * (len(text) + sum(one.nbytes for one in held)):
            return False
        with beside.open("wb", buffering=0) as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for one in held:
                for start, end in _row_chunks(one):
                    rows = states.rows(one, start, end) if isinstance(one, Stored) else one[start:end]
                    file.write(rows.reshape(-1).view(torch.uint8).numpy().data)
        beside.replace(path)
    except OSError:  # the run itself is sound, only its way back would be longer
        return False
    finally:
        beside.unlink(missing_ok=True)
    return True


def read_header(path: Path) -> dict[str, Any] | None:
    """The header that was given to `write_snapshot`; None where there is no whole file."""
    found = _read(path)
    return None if found is None else dict(found[0]["header"])


def read_snapshot(path: Path, states: StateStore) -> Any:
    """The tree that was given to `write_snapshot`, every `Stored` now in `states`.

    Raises:
        OutputError: no room for them.
    """
    found = _read(path)
    if found is None:
        raise FileNotFoundError(path)
    content, offset = found
    made = []
    with path.open("rb", buffering=0) as file:
        file.seek(offset)
        for shape, dtype, is_held in content["tensors"]:
            kind = getattr(torch, dtype)
            place = states.empty(tuple(shape), kind) if is_held else torch.empty(shape, dtype=kind)
            for start, end in _row_chunks(place):
                rows = torch.empty((end - start, *shape[1:]), dtype=kind)
                _fill(file, rows.view(-1).view(torch.uint8).numpy().data)
                if isinstance(place, Stored):
                    states.write(place, start, rows)
                else:
                    place[start:end] = rows
            made.append(place)
    return rebuilt(content["tree"], iter(made))


def _read(path: Path) -> tuple[dict[str, Any], int] | None:
    """The JSON and where the tensors begin."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > path.stat().st_size:
                return None
            content = json.loads(file.read(length))
        sizes = [
            torch.Size(shape).numel() * getattr(torch, dtype).itemsize
            for shape, dtype, _ in content["tensors"]
        ]
        if not isinstance(content["header"], dict) or path.stat().st_size != 8 + length + sum(sizes):
            return None
        return content, 8 + length
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error):
        return None


def _row_chunks(held: Stored | torch.Tensor) -> list[tuple[int, int]]:
    """First and end rows of parts of at most `CHUNK_BYTES`, or of one row."""
    rows = held.shape[0] if held.nbytes else 0
    step = max(1, CHUNK_BYTES * rows // max(1, held.nbytes))
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]


def _fill(file: Any, view: memoryview) -> None:
    while view:
        count = file.readinto(view)
        if not count:
            raise EOFError
        view = view[count:]
