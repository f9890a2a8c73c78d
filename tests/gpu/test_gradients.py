"""Gradients of a sparse FFN on a GPU, where torch's grouped product may be taken."""

from typing import Any

import pytest
import torch
from torch import Tensor

from prunecli.modules.sparse_ffn import EXPERT_PARTS, SparseFFN
from tests.gates import choose_among
from tests.gpu.pretend import Pretend

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
