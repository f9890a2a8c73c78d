"""Dense layers of a model on a CPU: float32 products without gradients go to oneDNN.

torch gives them to MKL, which is slower on some processors, most of all for the few rows of a decoding step. Measured
on an AVX-512 AMD EPYC with two threads, MKL / oneDNN: 5 rows of 1024 x 1024 weights 1.5, of 4096 x 1024 2.4, of an
output layer of 32,000 x 1024 3.9; 4,096 rows 1.2.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from prunecli.modules.cpu_linear import MIN_ONEDNN, has_onednn_linear, onednn_linear


class InferenceLinear(nn.Linear):
    """An `nn.Linear` with the same parameters, another kernel where `_goes_to_onednn`, and the same gradients."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (the name that nn.Linear gives it)
        """Map `[..., in]` to `[..., out]`."""
        if not self._goes_to_onednn(input):
            return super().forward(input)
        return onednn_linear(input, self.weight, self.bias)

    def _goes_to_onednn(self, given: Tensor) -> bool:
        weight = self.weight
        is_plain = type(weight) is nn.Parameter and given.dtype == weight.dtype == torch.float32
        is_here = weight.device.type == given.device.type == "cpu"
        needs_graph = torch.is_grad_enabled() and (given.requires_grad or weight.requires_grad)
        return (
            is_plain
            and is_here
            and not needs_graph
            and given.numel() > 0
            and weight.is_contiguous()
            and not torch.is_autocast_enabled("cpu")
            and not torch.compiler.is_compiling()
        )


def speed_up_linears(model: nn.Module) -> None:
    """Make every large `nn.Linear` of `model` an `InferenceLinear`, in its place; parameters and names stay."""
    if not has_onednn_linear():
        return
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.numel() >= MIN_ONEDNN:
            module.__class__ = InferenceLinear
