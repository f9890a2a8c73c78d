"""Which type fits, and what is said where none does; the memory that is free is made up."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from prunecli.errors import MemoryShortError
from prunecli.model.checkpoint import Checkpoint, open_model
from prunecli.modules import fitting, loading, precision
from prunecli.modules.fitting import Parts, fitting_dtype, free_for_each
from prunecli.modules.loading import load_model
from prunecli.processes import ProcessGroup
from tests.families import tiny_family

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
CPU = torch.device("cpu")


@pytest.fixture
def models(tmp_path: Path) -> dict[str, Checkpoint]:
    return {
        dtype: open_model(tiny_family(tmp_path / dtype, "llama", dtype=dtype)) for dtype in ("F32", "F16")
    }


def parameters(checkpoint: Checkpoint) -> int:
    return sum(info.numel for info in checkpoint.tensors.values())


@pytest.fixture(autouse=True)
def no_native_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "multiplies_natively", lambda *_: False)


def chosen(
    models: dict[str, Checkpoint],
    free: int,
    monkeypatch: pytest.MonkeyPatch,
    asked: str = "auto",
    **how: object,
) -> tuple[torch.dtype, list[str]]:
    monkeypatch.setattr(fitting, "new_memory", lambda _device: free)
    said: list[str] = []
    return fitting_dtype(models, CPU, asked, say=said.append, **how), said


def test_float32_takes_nine_tenths_of_what_is_free_else_bfloat16(
    models: dict[str, Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    del models["F16"]
    count = parameters(models["F32"])
    enough = -(-4 * count * 10 // 9)
    assert chosen(models, enough, monkeypatch) == (F32, [])
    dtype, (line,) = chosen(models, enough - 2, monkeypatch)
    assert dtype == BF16
    assert line.startswith("F32: stored as float32, computed in bfloat16 on the CPU (it would take ")
    with pytest.raises(MemoryShortError):
        chosen(models, 2 * count * 10 // 9 - 1, monkeypatch)


def test_what_is_stored_in_16_bits_is_doubled_only_where_half_is_left(
    models: dict[str, Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    del models["F32"]
    count = parameters(models["F16"])
    line = "F16: stored as float16, computed in float32 on the CPU."
    assert chosen(models, 8 * count, monkeypatch) == (F32, [line])
    assert chosen(models, 8 * count - 1, monkeypatch)[0] == BF16
    assert chosen(models, 8 * count - 1, monkeypatch, "float32") == (F32, [])  # asked for


def test_several_have_one_type_in_which_each_fits(
    models: dict[str, Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    count = parameters(models["F32"])
    assert chosen(models, 8 * count, monkeypatch)[0] == F32  # one after another, not the sum of both
    dtype, said = chosen(models, 4 * count, monkeypatch)
    assert dtype == BF16
    assert [line[:27] for line in said] == ["F32: stored as float32, com", "F16: stored as float16, com"]


def test_what_is_held_beside_the_weights_counts(
    models: dict[str, Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    del models["F16"]
    count = parameters(models["F32"])

    def beside(_checkpoint: Checkpoint, dtype: torch.dtype) -> Parts:
        return {"decoding": count * dtype.itemsize}

    assert chosen(models, 6 * count, monkeypatch)[0] == F32
    assert chosen(models, 6 * count, monkeypatch, beside=beside)[0] == BF16


def test_the_refusal_has_every_number(models: dict[str, Checkpoint], monkeypatch: pytest.MonkeyPatch) -> None:
    del models["F16"]
    count = parameters(models["F32"])
    with pytest.raises(MemoryShortError) as refused:
        chosen(models, 1000, monkeypatch, "float32", beside=lambda *_: {"decoding": 2048})
    needed = (4 * count + 2048) / 1024
    assert f"needs {needed:.2f} KiB on the CPU in float32 (weights " in refused.value.message
    assert "decoding 2.00 KiB); 1000 B are free" in refused.value.message
    shortage = refused.value.shortage
    assert (shortage.free, shortage.room, shortage.dtype) == (1000, 0, "float32")


def test_load_model_refuses_before_it_reads(
    models: dict[str, Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*_: object) -> None:
        raise AssertionError("weights are read")

    monkeypatch.setattr(loading, "build_model", read)
    monkeypatch.setattr(fitting, "new_memory", lambda _device: 1000)
    with pytest.raises(MemoryShortError, match=r"needs .* on the CPU in bfloat16"):
        load_model(models["F32"].path, device="cpu")


def test_each_of_several_processes_has_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(fitting, "new_memory", lambda _device: 1000)
    monkeypatch.setattr(ProcessGroup, "all_gather", lambda _group, value: [value, 400])
    assert free_for_each(CPU, ProcessGroup(0, 4)) == 400
    assert free_for_each(CPU) == 1000
