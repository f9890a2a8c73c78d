"""`copied_ranges`: the bytes that an output is a copy of."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prunecli.model.checkpoint import open_model
from prunecli.tensors import computing
from prunecli.tensors.dtypes import numpy_dtype
from prunecli.tensors.reader import Stored, TensorInfo, TensorReader, WeightFile
from prunecli.tensors.stream import Copy, Generated, Output, Slices, copied_ranges
from prunecli.tensors.writer import write_tensors
from tests.families import tiny_family
from tests.ffn_layouts import weights


def reader(name: str, dtype: str, shape: tuple[int, ...]) -> TensorReader:
    file = Path("none")
    return TensorReader(file, (WeightFile(file, {name: Stored(TensorInfo(name, dtype, shape), 0)}),))


@given(st.lists(st.integers(0, 9), max_size=12), st.integers(0, 3))
def test_ranges_spell_out_the_rows(rows, width):
    data = bytes(range(10 * width))
    ranges = tuple((row, row + 1) for row in rows)
    output = Output("out", "U8", (len(rows), width), Slices("router", 0, ranges))
    found = copied_ranges(reader("router", "U8", (10, width)), output)
    assert found is not None
    made = b"".join(data[start:stop] for start, stop in found)
    assert made == b"".join(data[row * width : (row + 1) * width] for row in rows)


def test_neighbouring_rows_are_one_range():
    output = Output("out", "F32", (5, 4), Slices("router", 0, ((0, 1), (1, 3), (6, 8))))
    assert copied_ranges(reader("router", "F32", (8, 4)), output) == [(0, 48), (96, 128)]


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


SHAPES = [(300, 40), (7, 3, 5), (11,), (0, 4), (6, 0)]


def generated_given(values: np.ndarray) -> Generated:
    return Generated(values.shape, lambda start, stop: values[start:stop])


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_is_written_as_given(shape, dtype, tmp_path, monkeypatch):
    monkeypatch.setattr(computing, "BLOCK_ELEMENTS", 64)
    values = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    asked = []

    def rows(start, stop):
        asked.append((start, stop))
        return values[start:stop]

    (tmp_path / "out").mkdir()
    with open_model(tiny_family(tmp_path / "source", "gpt2")) as source:
        outputs = [
            Output("one", dtype, shape, Generated(shape, rows)),
            Output("two", "F32", shape, generated_given(values)),
        ]
        write_tensors(source, outputs, tmp_path / "out")
    held = weights(tmp_path / "out")
    assert held["one"].tobytes() == values.astype(numpy_dtype(dtype)).tobytes()
    assert held["two"].tobytes() == values.tobytes()
    assert sorted(row for span in asked for row in range(*span)) == list(
        range(shape[0] if values.size else 0)
    )
