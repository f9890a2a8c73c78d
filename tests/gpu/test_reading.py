"""Weights on their way to a GPU."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from prunecli.modules import filling
from prunecli.modules.devices import full_device
from prunecli.modules.loading import load_model
from prunecli.modules.machine import CONTEXT_BYTES, limited
from prunecli.modules.saving import save_tensors
from prunecli.modules.sparse_ffn import EXPERT_PARTS, SparseFFN
from tests.gates import choose_among
from tests.gpu.conftest import Real
from tests.gpu.pretend import Pretend
from tests.tiny import tiny_nllb_moe


def test_chunk_by_chunk(gpu, monkeypatch):
    """The tensors equal those of a CPU: no chunk is overwritten too early, none is in memory that may move."""
    monkeypatch.setattr(filling, "CHUNK_BYTES", 1 << 10)
    path, dtype = tiny_nllb_moe("moe"), "bfloat16"
    want = load_model(path, device="cpu", dtype=dtype).state_dict()
    with gpu:
        found = load_model(path, device=gpu.device, dtype=dtype).state_dict()
        assert found.keys() == want.keys()
        for name, tensor in found.items():
            assert torch.equal(tensor.cpu(), want[name]), name
    if isinstance(gpu, Pretend):
        assert not gpu.timeline.overwritten


def test_no_more_than_is_given(gpu):
    """torch refuses more than `--memory`, as if the card had no more; afterwards it may be had."""
    with gpu:
        before = torch.cuda.memory_allocated() if isinstance(gpu, Real) else 0  # by tests in this process
        with limited(torch.device("cuda"), CONTEXT_BYTES + before + (64 << 20)):
            held = torch.empty(40 << 20, dtype=torch.uint8, device=gpu.device)
            with pytest.raises(torch.OutOfMemoryError) as raised:
                torch.empty_like(held)
        assert (full_device(raised.value) or "").startswith("cuda:0 (")
        assert torch.empty_like(held).is_cuda


# Weights on their way from a GPU to a file.


def test_tensor_after_tensor(gpu):
    """safetensors reads back each tensor of a GPU, whatever its type and shape."""
    held = {"half": torch.randn(3, 5).half(), "turned": torch.randn(4, 3).t(), "one": torch.tensor(2.5)}
    held |= {"none": torch.empty(0, 4), "counts": torch.arange(3), "bf16": torch.randn(7).bfloat16()}
    with gpu:
        there = {name: tensor.to(gpu.device) for name, tensor in held.items()}
        save_tensors(there, Path("model.safetensors"))
    found = load_file("model.safetensors")
    assert found.keys() == held.keys()
    for name, tensor in held.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


# Gradients of a sparse FFN on a GPU, where torch's grouped product may be taken.


EXPERTS = 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("used", [[1, 3, 4], [0, 5]])
def test_of_experts_with_and_without_tokens(gpu, dtype, used):
    """Gradients of used experts are those of a float32 model on a CPU; those of the others are zero."""
    torch.manual_seed(0)
    module = SparseFFN(32, 64, EXPERTS).to(dtype).train()
    choose_among(module, used)
    states = torch.randn(2, 7, 32).to(dtype)
    exact = SparseFFN(32, 64, EXPERTS).train()
    exact.load_state_dict(module.state_dict())
    choose_among(exact, used)
    exact(states.float()).square().sum().backward()
    with gpu:
        module = module.to(gpu.device)
        module(states.to(gpu.device)).float().square().sum().backward()
        found = {name: getattr(module, name).grad.cpu().float() for name in EXPERT_PARTS}
    for name, gradient in found.items():
        assert [expert for expert in range(EXPERTS) if gradient[expert].any()] == used
        want = getattr(exact, name).grad
        assert (gradient - want).norm() <= (1e-5 if dtype == torch.float32 else 0.05) * want.norm()


class Faulty(torch.autograd.Function):
    """A grouped product whose gradients for groups without rows are whatever was in memory."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(tokens, weight, ends)
        parts = tokens.tensor_split(ends.tolist()[:-1])
        return torch.cat([part @ weight[expert] for expert, part in enumerate(parts)])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        tokens, weight, ends = ctx.saved_tensors
        inputs, outputs = (rows.tensor_split(ends.tolist()[:-1]) for rows in (tokens, gradient))
        back = [part @ weight[expert].t() for expert, part in enumerate(outputs)]
        pairs = zip(inputs, outputs, strict=True)
        made = [x.t() @ y if len(x) else torch.full_like(weight[0], torch.nan) for x, y in pairs]
        return torch.cat(back), torch.stack(made), None


def test_of_a_kernel_that_leaves_them_out(monkeypatch):
    """torch's kernel on Blackwell does: pytorch/pytorch#172439."""
    monkeypatch.setattr(
        torch.nn.functional, "grouped_mm", lambda tokens, weight, offs: Faulty.apply(tokens, weight, offs)
    )
    gpu = Pretend((10, 0))
    gpu.patch(monkeypatch)
    test_of_experts_with_and_without_tokens(gpu, torch.bfloat16, [1, 3, 4])
