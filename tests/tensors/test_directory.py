"""Damaged .safetensors headers: each is refused by name, as the safetensors library refuses it."""

import contextlib
import json
import struct
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open

from prunecli.errors import CheckpointError
from prunecli.model.checkpoint import open_model
from tests.tiny import tiny_nllb_moe, write_json

ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
"""Of a good header: two float32 values at the beginning."""


def refused(said: str) -> None:
    """The model here is, with the name of its file."""
    with pytest.raises(CheckpointError, match=rf"model\.\w+: .*{said}"):
        open_model(".")


def write(header: bytes, length: int | None = None) -> None:
    prefix = struct.pack("<Q", len(header) if length is None else length)
    Path("model.safetensors").write_bytes(prefix + header + b"\0" * 8)
    write_json("config.json", {"model_type": "some"})


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
def test_entries(change, says):
    write(json.dumps({"a": {**ENTRY, **change}}).encode())
    refused(says)
    with pytest.raises(SafetensorError):
        safe_open("model.safetensors", "np")


def test_overlapping_tensors():
    other = {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}
    write(json.dumps({"a": ENTRY, "b": other}).encode())
    refused("b overlaps a")


@pytest.mark.parametrize(
    "header", ['"a": ENTRY, "a": ENTRY', '"a:b": ENTRY, "a:b": ENTRY', '"a": {"dtype": "F16", INNER}']
)
def test_a_name_that_occurs_twice(header):
    entry = json.dumps(ENTRY)
    write(f"{{{header}}}".replace("ENTRY", entry).replace("INNER", entry[1:-1]).encode())
    refused("occurs twice")


@pytest.mark.parametrize("length", [10**12, 2**63])
def test_an_absurd_header_size(length):
    write(b"{}", length=length)
    refused("its header would be")


@pytest.mark.parametrize("header", [b"[]", b"\xff\xfe", b"[" * 100_000])
def test_a_header_that_is_no_object(header):
    write(header)
    refused("its header")


@settings(max_examples=60)
@given(cut=st.integers(0, 60_000))
def test_every_truncation_is_refused(cut):
    data = _tiny_bytes()
    Path("model.safetensors").write_bytes(data[: cut % len(data)])
    write_json("config.json", {"model_type": "nllb-moe"})
    refused("truncated")


@lru_cache
def _tiny_bytes() -> bytes:
    with tempfile.TemporaryDirectory() as directory:
        return (tiny_nllb_moe(directory, experts=2, layers=2) / "model.safetensors").read_bytes()


def save(payload: Any, **options: Any) -> None:
    torch.save(payload, "pytorch_model.bin", **options)
    write_json("config.json", {"model_type": "some"})


@pytest.mark.parametrize("is_zip", [True, False])
def test_views_shared_storages_and_strides(is_zip):
    base = torch.arange(24.0).reshape(4, 6)
    tensors = {
        "base": base,
        "alias": base,
        "rows": base[1:3],
        "transposed": base.t(),
        "columns": base[:, ::2],
    }
    tensors |= {
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
        "flags": torch.tensor([True, False]),
    }
    tensors["expanded"] = torch.ones(1, 3).expand(4, 3)
    tensors["half"] = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    save(tensors, _use_new_zipfile_serialization=is_zip)
    checkpoint = open_model(".")
    assert list(checkpoint.tensors) == list(tensors)
    for name, tensor in tensors.items():
        values = checkpoint.read(name)
        assert values.shape == tuple(tensor.shape)
        assert np.array_equal(values.astype(np.float64), tensor.detach().double().numpy())


def test_a_torch_that_tells_no_offsets_without_values(monkeypatch):
    load = torch.load

    def older(path: Path, **options: Any) -> Any:
        loaded = load(path, **options)
        if options.get("map_location") == "meta":
            return {name: torch.empty_like(tensor) for name, tensor in loaded.items()}
        return loaded

    monkeypatch.setattr(torch, "load", older)
    payload = {"a": torch.arange(6.0), "b": torch.arange(8.0).reshape(2, 4)[1:]}
    save(payload)
    checkpoint = open_model(".")
    assert len({checkpoint.location(name)[0] for name in payload}) == 1
    assert checkpoint.read("a").tolist() == [0, 1, 2, 3, 4, 5]
    assert checkpoint.read("b").tolist() == [[4, 5, 6, 7]]


def test_a_file_that_would_run_code_is_refused():
    save({"layer": torch.nn.Linear(1, 1)})
    refused("not a plain file of tensors")


@pytest.mark.parametrize("payload", [[1, 2], {"step": 3}, {}], ids=str)
def test_other_payloads_are_refused(payload):
    save(payload)
    refused("")


def test_damaged_bytes_are_refused_or_read_as_other_values():
    path = tiny_nllb_moe(".", pickled=True, experts=2, layers=1) / "pytorch_model.bin"
    generator = np.random.default_rng(0)
    data = path.read_bytes()
    for _ in range(50):
        damaged = bytearray(data)
        for position in generator.integers(0, 6000, 4):
            damaged[position] = generator.integers(256)
        path.write_bytes(damaged)
        with contextlib.suppress(CheckpointError), open_model(".") as checkpoint:
            checkpoint.read("model.shared.weight")


@pytest.mark.parametrize("kept", [0, 3, 40, 1000, -30])
def test_a_truncated_file_is_refused(kept):
    path = tiny_nllb_moe(".", pickled=True) / "pytorch_model.bin"
    path.write_bytes(path.read_bytes()[:kept])
    refused("")
