"""`Output`: which bytes it is made of, and which outputs are refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prunecli.model.checkpoint import open_model
from prunecli.tensors import computing
from prunecli.tensors.dtypes import numpy_dtype
from prunecli.tensors.reader import TensorInfo
from prunecli.tensors.stream import ByteRange, Generated, Output, Slices, byte_ranges
from prunecli.tensors.writer import write_tensors
from tests.families import tiny_family
from tests.ffn_layouts import weights


@given(st.lists(st.integers(0, 9), max_size=12), st.integers(0, 3))
def test_ranges_spell_out_the_rows(rows: list[int], width: int) -> None:
    info = TensorInfo("router", "U8", (10, width))
    data = bytes(range(10 * width))
    ranges = tuple((row, row + 1) for row in rows)
    found = list(byte_ranges(Output("out", "U8", (len(rows), width), Slices("router", 0, ranges)), info))
    assert not any(part.picks for part in found)
    made = b"".join(data[part.start : part.start + part.nbytes] for part in found)
    assert made == b"".join(data[row * width : (row + 1) * width] for row in rows)


def test_slices_of_rows_are_picked_from_each() -> None:
    info = TensorInfo("out_proj", "F16", (3, 8))
    output = Output("out", "F16", (3, 5), Slices("out_proj", 1, ((0, 2), (2, 4), (5, 5), (7, 8))))
    assert list(byte_ranges(output, info)) == [ByteRange(0, 48, 16, ((0, 8), (14, 16)))]
    bias = Output("out", "F16", (3,), Slices("bias", 0, ((1, 2), (4, 6))))
    assert list(byte_ranges(bias, TensorInfo("bias", "F16", (8,)))) == [ByteRange(2, 2), ByteRange(8, 4)]


SHAPES = [(300, 40), (7, 3, 5), (11,), (0, 4), (6, 0)]


def generated_given(values: np.ndarray) -> Generated:
    return Generated(values.shape, lambda start, stop: values[start:stop])


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_is_written_as_given(
    shape: tuple[int, ...], dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(computing, "BLOCK_ELEMENTS", 64)
    values = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    asked: list[tuple[int, int]] = []

    def rows(start: int, stop: int) -> np.ndarray:
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
