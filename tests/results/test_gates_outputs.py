"""Sums of experts' outputs: what is read back, and what is refused."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest

from prunecli.errors import StatisticsError
from prunecli.results.gates import OUTPUTS_FORMAT, OutputSums


def write(path: Path, dtype: str, data: bytes, shape: tuple[int, ...] = (2, 2)) -> Path:
    """A file of one tensor of any type."""
    tensor = {"dtype": dtype, "shape": shape, "data_offsets": [0, len(data)]}
    head = json.dumps(
        {"__metadata__": {"format": OUTPUTS_FORMAT, "fingerprint": "x"}, "a/mlp": tensor}
    ).encode()
    path.write_bytes(struct.pack("<Q", len(head)) + head + data)
    return path


def test_what_was_written_is_read(tmp_path: Path) -> None:
    sums = np.arange(6.0).reshape(3, 2)
    OutputSums("x", {("a/b", "mlp"): sums}).write(tmp_path / "sums")
    read = OutputSums.read(tmp_path / "sums")
    assert read.fingerprint == "x"
    assert list(read.sums) == [("a/b", "mlp")]
    np.testing.assert_array_equal(read.sums["a/b", "mlp"], sums)


@pytest.mark.parametrize(
    ("dtype", "data", "shape"),
    [
        ("C64", bytes(32), (2, 2)),
        ("BF16", bytes(8), (2, 2)),
        ("F8_E4M3", bytes(4), (2, 2)),
        ("F32", bytes(16), (2, 2)),
        ("I64", bytes(32), (2, 2)),
        ("F64", bytes(32), (4,)),
        ("F64", struct.pack("<4d", 1, 2, float("nan"), 3), (2, 2)),
    ],
)
def test_other_types_and_shapes_are_refused(
    dtype: str, data: bytes, shape: tuple[int, ...], tmp_path: Path
) -> None:
    with pytest.raises(StatisticsError, match="holds no sums of outputs"):
        OutputSums.read(write(tmp_path / "sums", dtype, data, shape))
