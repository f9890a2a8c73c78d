"""`Output`: which bytes it is made of, and which outputs are refused."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from prunecli.tensors.reader import TensorInfo
from prunecli.tensors.stream import ByteRange, Output, Slices, byte_ranges


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
