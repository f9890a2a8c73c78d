"""Checks of written pictures."""

import struct
import zlib
from pathlib import Path
from typing import Any


def pixels(path: Path | str) -> tuple[int, int]:
    """Return width and height of a PNG file that is whole and more than an empty canvas."""
    data = Path(path).read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    chunks, at = [], 8
    while at < len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        chunks.append((data[at + 4 : at + 8], data[at + 8 : at + 8 + length]))
        at += 12 + length
    assert (chunks[0][0], chunks[-1][0]) == (b"IHDR", b"IEND")
    width, height = struct.unpack(">II", chunks[0][1][:8])
    drawn = zlib.decompress(b"".join(content for kind, content in chunks if kind == b"IDAT"))
    assert len(drawn) >= width * height
    assert len(set(drawn)) > 10
    return width, height


def drawn(specification: dict[str, Any], mark: str) -> list[dict[str, Any]]:
    """Return the data of all layers of a chart with this mark."""
    found = []
    for layer in specification.get("layer", [specification]):
        if layer["mark"]["type"] == mark:
            name = layer.get("data", specification.get("data"))["name"]
            found += specification["datasets"][name]
    return found
