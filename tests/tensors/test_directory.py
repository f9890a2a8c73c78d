"""Damaged .safetensors headers: each is refused by name, as the safetensors library refuses it."""

from __future__ import annotations

import json
import struct
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open

from prunecli.errors import CheckpointError
from prunecli.model.checkpoint import open_model
from tests.tiny import tiny_nllb_moe, write_json

ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
"""Of a good header: two float32 values at the beginning."""


class TestHeaders:
    def write(
        self, directory: Path, header: bytes, data: bytes = b"\0" * 8, length: int | None = None
    ) -> Path:
        path = directory / "model.safetensors"
        path.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header + data)
        write_json(directory / "config.json", {"model_type": "some"})
        return path

    def test_the_form_that_is_damaged_below_is_a_good_one(self, tmp_path: Path) -> None:
        self.write(tmp_path, json.dumps({"a": ENTRY}).encode())
        assert list(open_model(tmp_path).tensors) == ["a"]

    @pytest.mark.parametrize(
        ("change", "says"),
        [
            ({"data_offsets": [0, 4]}, "its shape"),
            ({"data_offsets": [8, 0]}, "its shape"),
            ({"data_offsets": [-4, 4]}, "not of the safetensors form"),
            ({"data_offsets": [0]}, "not of the safetensors form"),
            ({"data_offsets": [0, 8.0]}, "not of the safetensors form"),
            ({"shape": [3], "data_offsets": [0, 12]}, "truncated"),
            ({"shape": [-2]}, "not of the safetensors form"),
            ({"shape": [True, 2]}, "not of the safetensors form"),
            ({"shape": 2}, "not of the safetensors form"),
            ({"shape": [1], "data_offsets": [0, 4]}, "after the last tensor"),
            ({"shape": [1], "data_offsets": [4, 8]}, "unused bytes"),
            ({"dtype": "F31"}, "F31"),
            ({"dtype": 3}, "not of the safetensors form"),
        ],
    )
    def test_entries(self, tmp_path: Path, change: dict[str, Any], says: str) -> None:
        path = self.write(tmp_path, json.dumps({"a": {**ENTRY, **change}}).encode())
        with pytest.raises(CheckpointError, match=says) as caught:
            open_model(tmp_path)
        assert str(path) in str(caught.value)
        with pytest.raises(SafetensorError):
            safe_open(path, "np")

    def test_overlapping_tensors(self, tmp_path: Path) -> None:
        other = {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}
        self.write(tmp_path, json.dumps({"a": ENTRY, "b": other}).encode())
        with pytest.raises(CheckpointError, match="b overlaps a"):
            open_model(tmp_path)

    @pytest.mark.parametrize(
        "header", ['"a": ENTRY, "a": ENTRY', '"a:b": ENTRY, "a:b": ENTRY', '"a": {"dtype": "F16", INNER}']
    )
    def test_a_name_that_occurs_twice(self, tmp_path: Path, header: str) -> None:
        entry = json.dumps(ENTRY)
        self.write(tmp_path, f"{{{header}}}".replace("ENTRY", entry).replace("INNER", entry[1:-1]).encode())
        with pytest.raises(CheckpointError, match="occurs twice"):
            open_model(tmp_path)

    @pytest.mark.parametrize("length", [10**12, 2**63])
    def test_an_absurd_header_size(self, tmp_path: Path, length: int) -> None:
        self.write(tmp_path, b"{}", length=length)
        with pytest.raises(CheckpointError, match="its header would be"):
            open_model(tmp_path)

    @pytest.mark.parametrize("header", [b"[]", b"{", b"\xff\xfe", b"[" * 100_000])
    def test_a_header_that_is_no_object(self, tmp_path: Path, header: bytes) -> None:
        self.write(tmp_path, header)
        with pytest.raises(CheckpointError, match="its header"):
            open_model(tmp_path)

    @settings(max_examples=60)
    @given(cut=st.integers(0, 60_000))
    def test_every_truncation_is_refused(self, tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
        directory = tmp_path_factory.mktemp("cut")
        data = _tiny_bytes()
        (directory / "model.safetensors").write_bytes(data[: cut % len(data)])
        write_json(directory / "config.json", {"model_type": "nllb-moe"})
        with pytest.raises(CheckpointError, match=r"model\.safetensors: truncated"):
            open_model(directory)


@lru_cache
def _tiny_bytes() -> bytes:
    import tempfile

    with tempfile.TemporaryDirectory() as directory:
        return (tiny_nllb_moe(directory, experts=2, layers=2) / "model.safetensors").read_bytes()
