import pytest
import torch

from prunecli.errors import MemoryShortError
from prunecli.model.checkpoint import Checkpoint, open_model
from prunecli.modules import fitting
from prunecli.modules.devices import Devices
from prunecli.modules.fitting import candidates, fitting_dtype, multiplies_natively
from tests.families import tiny_family

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")


@pytest.fixture
def opened():
    return {dtype: open_model(tiny_family(dtype, "t5", dtype=dtype)) for dtype in ("F32", "BF16", "F16")}


# (device, multiplied natively there) -> of what is stored in float32, bfloat16, float16
TABLE = [
    (CPU, (), [(F32, BF16), (F32, BF16), (F32, BF16)]),
    (CPU, (BF16,), [(F32, BF16), (BF16,), (F32, BF16)]),
    (CUDA, (BF16, F16), [(F32, BF16), (BF16,), (F16,)]),
    (CUDA, (F16,), [(F32,), (F32,), (F16,)]),
    (CUDA, (), [(F32,), (F32,), (F32, F16)]),
]


@pytest.mark.parametrize(("device", "native", "found"), TABLE)
def test_by_what_is_stored_and_what_the_device_multiplies(opened, device, native, found, monkeypatch):
    monkeypatch.setattr(fitting, "multiplies_natively", lambda dtype, _device: dtype in native)
    assert [candidates("auto", [opened[dtype]], device) for dtype in ("F32", "BF16", "F16")] == found


def test_models_of_several_types_are_not_compared_in_an_emulated_one(opened, monkeypatch):
    monkeypatch.setattr(fitting, "multiplies_natively", multiplies_natively)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (7, 0))
    assert candidates("auto", opened.values(), CUDA) == (F32,)
    assert candidates("bf16", opened.values(), CUDA) == (BF16,)


@pytest.mark.parametrize("capability", [(7, 0), (8, 0), (9, 0), (10, 0), (12, 0)])
@pytest.mark.parametrize(("family", "has_experts"), [("nllb-moe", True), ("t5", False)])
def test_experts_of_float32_go_in_bfloat16_where_grouped_products_are_fast(
    family, has_experts, capability, monkeypatch
):
    monkeypatch.setattr(fitting, "multiplies_natively", multiplies_natively)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    checkpoint = open_model(tiny_family(family, family, dtype="F32"))
    fast, usual = has_experts and capability[0] in (9, 10), (F32,) if capability < (8, 0) else (F32, BF16)
    assert candidates("auto", [checkpoint], CUDA) == ((BF16,) if fast else usual)
    assert candidates("auto", [checkpoint], CUDA, gradients=True) == usual


def test_gradients_are_never_computed_in_float16_unasked(opened, monkeypatch):
    monkeypatch.setattr(fitting, "multiplies_natively", lambda *_: True)
    assert candidates("auto", [opened["F16"]], CUDA, gradients=True) == (F32, BF16)
    assert candidates("auto", [opened["BF16"]], CUDA, gradients=True) == (BF16,)


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
def test_what_a_cpu_multiplies(machine, flags, onednn, native, monkeypatch):
    monkeypatch.setattr(fitting.platform, "machine", lambda: machine)
    monkeypatch.setattr(fitting, "onednn_bfloat16", lambda: onednn)
    for flag in ("avx512_bf16", "amx_tile"):
        answer = flag in flags
        monkeypatch.setattr(torch.cpu, f"_is_{flag}_supported", lambda answer=answer: answer, raising=False)
    assert multiplies_natively(BF16, CPU) is native
    assert not multiplies_natively(F16, CPU)


@pytest.fixture
def models(opened):
    del opened["BF16"]
    return opened


def parameters(checkpoint: Checkpoint) -> int:
    return sum(info.numel for info in checkpoint.tensors.values())


@pytest.fixture(autouse=True)
def no_native_bfloat16(monkeypatch):
    monkeypatch.setattr(fitting, "multiplies_natively", lambda *_: False)


def chosen(
    models: dict[str, Checkpoint],
    free: int,
    monkeypatch: pytest.MonkeyPatch,
    asked: str = "auto",
    **how: object,
) -> tuple[torch.dtype, list[str]]:
    monkeypatch.setattr(fitting, "new_memory", lambda _device: free)
    said = []
    return fitting_dtype(models, Devices(CPU), asked, say=said.append, **how), said


def test_float32_takes_nine_tenths_of_what_is_free_else_bfloat16(models, monkeypatch):
    del models["F16"]
    count = parameters(models["F32"])
    enough = -(-4 * count * 10 // 9)
    assert chosen(models, enough, monkeypatch) == (F32, [])
    dtype, (line,) = chosen(models, enough - 2, monkeypatch)
    assert dtype == BF16
    assert line.startswith("F32: stored as float32, computed in bfloat16 on the CPU (it would take ")
    with pytest.raises(MemoryShortError):
        chosen(models, 2 * count * 10 // 9 - 1, monkeypatch)


def test_what_is_stored_in_16_bits_is_doubled_only_where_half_is_left(models, monkeypatch):
    del models["F32"]
    count = parameters(models["F16"])
    line = "F16: stored as float16, computed in float32 on the CPU."
    assert chosen(models, 8 * count, monkeypatch) == (F32, [line])
    assert chosen(models, 8 * count - 1, monkeypatch)[0] == BF16
    assert chosen(models, 8 * count - 1, monkeypatch, "float32") == (F32, [])  # asked for


def test_several_have_one_type_in_which_each_fits(models, monkeypatch):
    count = parameters(models["F32"])
    assert chosen(models, 8 * count, monkeypatch)[0] == F32  # one after another, not the sum of both
    dtype, said = chosen(models, 4 * count, monkeypatch)
    assert dtype == BF16
    assert [line[:27] for line in said] == ["F32: stored as float32, com", "F16: stored as float16, com"]


def test_the_refusal_has_every_number(models, monkeypatch):
    del models["F16"]
    count = parameters(models["F32"])
    with pytest.raises(MemoryShortError) as refused:
        chosen(models, 1000, monkeypatch, "float32", beside=lambda *_: {"decoding": 2048})
    needed = (4 * count + 2048) / 1024
    assert f"needs {needed:.2f} KiB on the CPU in float32 (weights " in refused.value.message
    assert "decoding 2.00 KiB); 1000 B are free" in refused.value.message
    need = refused.value.need
    assert (need.free, need.room, need.dtype) == ([1000], 0, F32)
