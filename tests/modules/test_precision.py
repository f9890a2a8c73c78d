"""The type that is computed in where nobody asks for one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from prunecli.errors import UsageError
from prunecli.model.checkpoint import Checkpoint, open_model
from prunecli.modules import precision
from prunecli.modules.precision import candidates, choose_dtype, multiplies_natively
from tests.families import tiny_family

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")


@pytest.fixture
def opened(tmp_path: Path) -> dict[str, Checkpoint]:
    return {
        dtype: open_model(tiny_family(tmp_path / dtype, "t5", dtype=dtype))
        for dtype in ("F32", "BF16", "F16")
    }


# (device, multiplied natively there) -> of what is stored in float32, bfloat16, float16
TABLE = [
    (CPU, (), [(F32, BF16), (F32, BF16), (F32, BF16)]),
    (CPU, (BF16,), [(F32, BF16), (BF16,), (F32, BF16)]),
    (CUDA, (BF16, F16), [(F32, BF16), (BF16,), (F16,)]),
    (CUDA, (F16,), [(F32, BF16), (F32, BF16), (F16,)]),
    (CUDA, (), [(F32, BF16), (F32, BF16), (F32, F16)]),
]


@pytest.mark.parametrize(("device", "native", "found"), TABLE)
def test_by_what_is_stored_and_what_the_device_multiplies(
    opened: dict[str, Checkpoint],
    device: torch.device,
    native: tuple[torch.dtype, ...],
    found: list[tuple[torch.dtype, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(precision, "multiplies_natively", lambda dtype, _device: dtype in native)
    assert [candidates("auto", [opened[dtype]], device) for dtype in ("F32", "BF16", "F16")] == found


@pytest.mark.parametrize("device", [CPU, CUDA])
def test_models_of_several_types_are_compared_in_one(
    opened: dict[str, Checkpoint], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "multiplies_natively", lambda *_: True)
    assert candidates("auto", opened.values(), device) == (F32, BF16)
    assert candidates("auto", [opened["F16"], opened["F16"]], device) == (F16,)


def test_gradients_are_never_computed_in_float16_unasked(
    opened: dict[str, Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "multiplies_natively", lambda *_: True)
    assert candidates("auto", [opened["F16"]], CUDA, gradients=True) == (F32, BF16)
    assert candidates("auto", [opened["BF16"]], CUDA, gradients=True) == (BF16,)


@pytest.mark.parametrize(
    ("written", "dtype"),
    [("fp16", F16), ("half", F16), ("BF16", BF16), ("torch.float32", F32), ("float", F32), (" fp32 ", F32)],
)
def test_as_it_is_asked_for(opened: dict[str, Checkpoint], written: str, dtype: torch.dtype) -> None:
    assert choose_dtype(written, opened["F32"], CPU) == dtype


@pytest.mark.parametrize("written", ["float64", "int8", "automatic", ""])
def test_what_no_model_runs_in(opened: dict[str, Checkpoint], written: str) -> None:
    with pytest.raises(UsageError, match=f"--dtype {written}: no such type"):
        choose_dtype(written, opened["F32"], CPU)


@pytest.mark.parametrize(("capability", "native"), [((6, 1), []), ((7, 5), [F16]), ((8, 0), [F16, BF16])])
def test_what_a_gpu_multiplies(
    capability: tuple[int, int], native: list[torch.dtype], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    assert [dtype for dtype in (F16, BF16) if multiplies_natively(dtype, CUDA)] == native


@pytest.mark.parametrize(
    ("machine", "flags", "onednn", "native"),
    [
        ("x86_64", {"avx512_bf16"}, True, True),
        ("x86_64", {"amx_tile"}, True, True),
        ("x86_64", set(), True, False),  # AVX-512 alone: oneDNN does it, by way of float32
        ("x86_64", {"avx512_bf16"}, False, False),
        ("aarch64", set(), True, True),
    ],
)
def test_what_a_cpu_multiplies(
    machine: str, flags: set[str], onednn: bool, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision.platform, "machine", lambda: machine)
    monkeypatch.setattr(precision, "onednn_bfloat16", lambda: onednn)
    for flag in ("avx512_bf16", "amx_tile"):
        answer = flag in flags
        monkeypatch.setattr(torch.cpu, f"_is_{flag}_supported", lambda answer=answer: answer, raising=False)
    assert multiplies_natively(BF16, CPU) is native
    assert not multiplies_natively(F16, CPU)
