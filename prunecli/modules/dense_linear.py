"""Dense layers of a model on a CPU, by oneDNN: weights as checkpoints have them, or packed for decoding alone.

torch gives float32 products to MKL, which is slower on some processors, most of all for the few rows of a decoding
step. Measured on an AVX-512 AMD EPYC with two threads, MKL / oneDNN: 5 rows of 1024 x 1024 weights 1.5, of 4096 x 1024
2.4, of an output layer of 32,000 x 1024 3.9; 4,096 rows 1.2.

Those few rows read a weight as checkpoints have it at half of the memory's bandwidth; packed, it lies in the blocks
that oneDNN multiplies by. On the same processor, 5 rows, of 32 GB/s: 4096 x 1024 float32 weights by MKL 8, by oneDNN
16, packed 26; an output layer of 32,000 x 1024 5, 15 and 29; in bfloat16 16 and 30. Only a single row of float32 is
slower packed, 20 for 29.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor, nn

from prunecli.modules.cpu_linear import MIN_ONEDNN, can_pack, has_onednn_linear, onednn_linear, pack


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


class PackedLinear(nn.Linear):
    """An `nn.Linear` for inference; its `weight` is opaque, but for type, shape and `to_dense()`."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (the name that nn.Linear gives it)
        """Map `[..., in]` to `[..., out]`.

        Raises:
            RuntimeError: gradients are wanted, which a packed weight does not let through.
        """
        if input.requires_grad and torch.is_grad_enabled():
            raise RuntimeError("a model loaded for decoding has no gradients: open it with load_model")
        return onednn_linear(input, self.weight, self.bias)


def pack_linears(model: nn.Module) -> None:
    """Make every large `nn.Linear` of `model` a `PackedLinear`, in its place, where this CPU gains by it.

    One weight after another gives way to its packed form, so that memory grows by the largest of them, for a moment.
    A weight that other modules use too (an output layer tied to the embeddings) stays: packed, it would be a second
    copy.
    """
    holders = Counter(
        id(parameter)
        for module in model.modules()
        for parameter in module._parameters.values()
        if parameter is not None
    )
    for module in model.modules():
        if type(module) not in (nn.Linear, InferenceLinear) or holders[id(module.weight)] > 1:
            continue
        weight = module.weight
        if weight.device.type == "cpu" and weight.numel() >= MIN_ONEDNN and can_pack(weight.dtype):
            module.weight = nn.Parameter(pack(weight.detach()), requires_grad=False)
            module.__class__ = PackedLinear
