"""Dense layers whose weights lie in the blocks that oneDNN multiplies by: for models that only decode, on a CPU.

The few rows of a decoding step read a weight as checkpoints have it at half of the memory's bandwidth. Measured on an
AVX-512 AMD EPYC with two threads, 5 rows, of 32 GB/s: 4096 x 1024 float32 weights by MKL 8, by oneDNN 16, packed 26;
an output layer of 32,000 x 1024 5, 15 and 29; in bfloat16 16 and 30. Only a single row of float32 is slower packed, 20
for 29.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor, nn

from prunecli.modules.cpu_linear import MIN_ONEDNN, can_pack, onednn_linear
from prunecli.modules.inference_linear import InferenceLinear

ROWS = 32
"""Rows that the blocks are chosen for: the same from 2 to hundreds."""


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
            packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS)
            module.weight = nn.Parameter(packed, requires_grad=False)
            module.__class__ = PackedLinear
