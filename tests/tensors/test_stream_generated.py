"""Tensors that are given, or made as they are written: the same bytes as of the whole array."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from prunecli.model.checkpoint import open_model
from prunecli.tensors import computing
from prunecli.tensors.dtypes import numpy_dtype
from prunecli.tensors.stream import Generated, Output
from prunecli.tensors.writer import write_tensors
from tests.families import tiny_family
from tests.ffn_layouts import weights

SHAPES = [(300, 40), (7, 3, 5), (11,), (0, 4), (6, 0)]


def given(values: np.ndarray) -> Generated:
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
            Output("two", "F32", shape, given(values)),
        ]
        write_tensors(source, outputs, tmp_path / "out")
    held = weights(tmp_path / "out")
    assert held["one"].tobytes() == values.astype(numpy_dtype(dtype)).tobytes()
    assert held["two"].tobytes() == values.tobytes()
    assert sorted(row for span in asked for row in range(*span)) == list(
        range(shape[0] if values.size else 0)
    )
