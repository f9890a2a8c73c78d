import pytest
import torch

from prunecli.errors import UsageError
from prunecli.modules.devices import choose_device, full_device

NO_KERNEL = (
    "CUDA error: no kernel image is available for execution on the device\n"
    "CUDA kernel errors might be asynchronously reported at some other API call"
)


@pytest.fixture
def card(monkeypatch):
    """A V100 that torch finds, by wheels for CUDA 13."""
    facts = {
        "is_available": lambda: True,
        "get_device_capability": lambda _device=None: (7, 0),
        "get_device_name": lambda _device=None: "Tesla V100-SXM2-32GB",
        "get_arch_list": lambda: ["sm_75", "sm_80", "sm_90"],
        "current_device": lambda: 0,
        "mem_get_info": lambda _device=None: (1 << 28, 32 << 30),
        "memory_reserved": lambda _device=None: 31 << 30,
    }
    for name, fact in facts.items():
        monkeypatch.setattr(torch.cuda, name, fact)
    return monkeypatch


def failing(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    stock = torch.ones

    def make(*sizes: int, device: torch.device) -> torch.Tensor:
        if device.type == "cuda":
            raise error
        return stock(*sizes, device=device)

    monkeypatch.setattr(torch, "ones", make)


def test_a_card_without_kernels_is_refused_by_name(card):
    failing(card, torch.AcceleratorError(NO_KERNEL))
    with pytest.raises(UsageError) as caught:
        choose_device("auto")
    assert "`device=auto`: torch" in caught.value.message
    assert "Tesla V100-SXM2-32GB (sm_70; it has those of sm_75, sm_80, sm_90)" in caught.value.message
    assert "cu126" in str(caught.value.remedy)
    assert "`device=cpu`" in str(caught.value.remedy)
    assert len(str(caught.value).splitlines()) == 2
    assert choose_device("cpu") == torch.device("cpu")


def test_other_reasons_are_said_too(card):
    failing(card, RuntimeError("CUDA error: device is busy.\nMore of it"))
    with pytest.raises(UsageError, match=r"`device=auto`: torch cannot use it .*device is busy"):
        choose_device("auto")


@pytest.mark.parametrize(
    ("error", "where"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), "GPU"),
        (torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might …"), "GPU"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "GPU"),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: can't allocate memory"),
            "host",
        ),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), None),
        (ValueError("out of memory"), None),
    ],
)
def test_what_is_short_of_memory(card, error, where):
    said = {
        "GPU": "cuda:0 (32.00 GiB, 31.00 GiB of it this process's, 256.00 MiB free)",
        "host": "the host",
        None: None,
    }
    assert full_device(error) == said[where]


def test_a_card_that_answers_no_more(card):
    def fail(_device=None):
        raise torch.AcceleratorError("CUDA error: out of memory")

    card.setattr(torch.cuda, "mem_get_info", fail)
    assert full_device(torch.AcceleratorError("CUDA error: out of memory")) == "the GPU"
