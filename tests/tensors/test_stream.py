"""`Output`: which bytes it is made of, and which outputs are refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prunecli.errors import CheckpointError
from prunecli.model.checkpoint import Checkpoint, open_model
from prunecli.tensors.reader import TensorInfo
from prunecli.tensors.stream import ByteRange, Copy, Output, Rows, Slices, byte_ranges, check_expressions
from tests.tiny import tiny_nllb_moe

NORM = "model.encoder.layer_norm.weight"
ROUTER = "model.encoder.layers.1.ffn.router.classifier.weight"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkpoint]:
    with open_model(tiny_nllb_moe(tmp_path_factory.mktemp("stream") / "tiny")) as opened:
        yield opened


def test_output_knows_its_size() -> None:
    output = Output("a", "F16", (3, 5), Copy("b"))
    assert output.nbytes == 30
    assert output.info == TensorInfo("a", "F16", (3, 5))


@given(st.lists(st.integers(0, 9), max_size=12), st.integers(0, 3))
def test_ranges_spell_out_the_rows(rows: list[int], width: int) -> None:
    info = TensorInfo("router", "U8", (10, width))
    data = bytes(range(10 * width))
    found = list(byte_ranges(Output("out", "U8", (len(rows), width), Rows("router", tuple(rows))), info))
    assert not any(part.picks for part in found)
    made = b"".join(data[part.start : part.start + part.nbytes] for part in found)
    assert made == b"".join(data[row * width : (row + 1) * width] for row in rows)


def test_neighbouring_rows_are_one_range() -> None:
    info = TensorInfo("router", "F32", (8, 4))
    output = Output("out", "F32", (5, 4), Rows("router", (0, 1, 2, 6, 7)))
    assert list(byte_ranges(output, info)) == [ByteRange(0, 48), ByteRange(96, 32)]


def test_slices_of_rows_are_picked_from_each() -> None:
    info = TensorInfo("out_proj", "F16", (3, 8))
    output = Output("out", "F16", (3, 5), Slices("out_proj", 1, ((0, 2), (2, 4), (5, 5), (7, 8))))
    assert list(byte_ranges(output, info)) == [ByteRange(0, 48, 16, ((0, 8), (14, 16)))]
    bias = Output("out", "F16", (3,), Slices("bias", 0, ((1, 2), (4, 6))))
    assert list(byte_ranges(bias, TensorInfo("bias", "F16", (8,)))) == [ByteRange(2, 2), ByteRange(8, 4)]


def test_a_copy_is_the_whole_tensor() -> None:
    info = TensorInfo("a", "F32", (8, 4))
    assert list(byte_ranges(Output("a", "F16", (8, 4), Copy("a")), info)) == [ByteRange(0, 128)]


def test_good_outputs_pass(checkpoint: Checkpoint) -> None:
    check_expressions(
        checkpoint,
        [Output(NORM, "BF16", (16,), Copy(NORM)), Output("r", "F32", (2, 16), Rows(ROUTER, (7, 0)))],
    )


def test_absent_source(checkpoint: Checkpoint) -> None:
    with pytest.raises(CheckpointError, match=r"holds no tensor model\.nothing"):
        check_expressions(checkpoint, [Output("a", "F32", (1,), Copy("model.nothing"))])


@pytest.mark.parametrize(
    ("outputs", "fault"),
    [
        ([Output(NORM, "F32", (15,), Copy(NORM))], "its source gives"),
        ([Output(ROUTER, "F32", (2, 16), Rows(ROUTER, (0, 8)))], "lacks some of the rows"),
        ([Output(ROUTER, "F32", (1, 16), Rows(ROUTER, (-1,)))], "lacks some of the rows"),
        ([Output(ROUTER, "F32", (3, 16), Rows(ROUTER, (0, 1)))], "its source gives"),
        ([Output(ROUTER, "F32", (8, 2), Slices(ROUTER, 1, ((15, 17),)))], "lacks some of the ranges"),
        ([Output(ROUTER, "F32", (8, 2), Slices(ROUTER, 2, ((0, 2),)))], "lacks some of the ranges"),
        ([Output(ROUTER, "F32", (8, 2), Slices(ROUTER, 1, ((3, 6),)))], "its source gives"),
        ([Output(NORM, "I32", (16,), Copy(NORM))], "no cast from F32 to I32"),
        ([Output(NORM, "F32", (16,), Copy(NORM))] * 2, "written twice"),
    ],
)
def test_outputs_that_cannot_be(checkpoint: Checkpoint, outputs: list[Output], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        check_expressions(checkpoint, outputs)


def test_rows_of_a_scalar(tmp_path: Path) -> None:
    class Scalar:
        def info(self, name: str) -> TensorInfo:
            return TensorInfo(name, "F32", ())

    with pytest.raises(ValueError, match="lacks some of the rows"):
        check_expressions(Scalar(), [Output("a", "F32", (1,), Rows("a", (0,)))])  # type: ignore[arg-type]
