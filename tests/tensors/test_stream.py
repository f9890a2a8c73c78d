"""`copied_ranges`: the bytes that an output is a copy of."""

from __future__ import annotations

from pathlib import Path

from prunecli.tensors.reader import Stored, TensorInfo, TensorReader, WeightFile
from prunecli.tensors.stream import Copy, Output, Slices, copied_ranges


def reader(name: str, dtype: str, shape: tuple[int, ...]) -> TensorReader:
    file = Path("none")
    return TensorReader(file, (WeightFile(file, {name: Stored(TensorInfo(name, dtype, shape), 0)}),))


def test_columns_casts_and_many_ranges_are_computed():
    source = reader("router", "F16", (600, 8))
    scattered = Slices("router", 0, tuple((row, row + 1) for row in range(0, 600, 2)))
    for dtype, shape, expression in (
        ("F16", (600, 5), Slices("router", 1, ((0, 2), (5, 8)))),
        ("F32", (600, 8), Copy("router")),
        ("F16", (300, 8), scattered),
    ):
        assert copied_ranges(source, Output("out", dtype, shape, expression)) is None
    bias = Output("out", "F16", (3,), Slices("bias", 0, ((1, 2), (4, 6))))
    assert copied_ranges(reader("bias", "F16", (8,)), bias) == [(2, 4), (8, 12)]
