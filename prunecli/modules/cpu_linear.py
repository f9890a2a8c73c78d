"""Linear layers on a CPU: of experts, for ragged numbers of rows on one thread; dense ones of a model; no gradients.

torch's own choices are best for large even products. Measured on AVX-512 with 1024 x 4096 weights on one thread: at 64
rows, float32 by MKL takes 7.0 ms and by oneDNN 5.8. One row reads bfloat16 weights at 9.6 GB/s by oneDNN, at 20 GB/s by
torch's dot products.

For the few rows of a decoding step MKL is slower still on some of them. On an AMD EPYC with two threads, MKL to oneDNN:
5 rows of 1024 x 1024 float32 weights 1.5, of 4096 x 1024 2.4, of an output layer of 32,000 x 1024 3.9; 4,096 rows 1.2.
Those rows read a weight as checkpoints have it at half of the memory's bandwidth; packed, it lies in the blocks that
oneDNN multiplies by. Of 32 GB/s: 4096 x 1024 float32 weights by MKL 8, by oneDNN 16, packed 26; an output layer of
32,000 x 1024 5, 15 and 29; in bfloat16 16 and 30. Only a single row of float32 is slower packed, 20 for 29.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor, nn
from torch.backends import mkldnn
from torch.nn import functional

from prunecli.private import onednn_has_bfloat16, onednn_linear, onednn_packed

MIN_ONEDNN = 1 << 20
"""Weights from which float32 products go to oneDNN, which compiles about 0.5 ms for each new shape."""


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


def speed_up_linears(model: nn.Module) -> None:
    """Make every large `nn.Linear` of `model` an `InferenceLinear`, in its place; parameters and names stay."""
    if not has_onednn_linear():
        return
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.numel() >= MIN_ONEDNN:
            module.__class__ = InferenceLinear


def pack_linears(model: nn.Module) -> None:
    """Make every large `nn.Linear` of `model` a `PackedLinear`, in its place, where this CPU gains by it.

    One weight after another gives way to its packed form, so that memory grows by the largest of them, for a moment.
    A weight that other modules use too (an output layer tied to the embeddings) stays: packed, it would be a second
    copy.
    """
    holders = Counter(
        id(parameter) for module in model.modules() for parameter in module.parameters(recurse=False)
    )
    for module in model.modules():
        if type(module) not in (nn.Linear, InferenceLinear) or holders[id(module.weight)] > 1:
            continue
        weight = module.weight
        if weight.device.type == "cpu" and weight.numel() >= MIN_ONEDNN and can_pack(weight.dtype):
            module.weight = nn.Parameter(onednn_packed(weight.detach()), requires_grad=False)
            module.__class__ = PackedLinear


def linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`rows W^T + b`, possibly followed by rows to be ignored.

    Args:
        rows: `[rows, in]`, in the type of the weight.
        weight: `[out, in]`, contiguous.
        bias: `[out]`, or None.

    Returns:
        `[at least rows, out]`.
    """
    if weight.dtype == torch.float32:
        goes_to_onednn = weight.numel() >= MIN_ONEDNN and has_onednn_linear()
    else:  # where torch's own switch of oneDNN may be off, see `dot_products`
        goes_to_onednn = weight.dtype == torch.bfloat16 and len(rows) > 1 and onednn_bfloat16()
    needs_graph = torch.is_grad_enabled() and (rows.requires_grad or weight.requires_grad)
    if goes_to_onednn and not needs_graph:
        return onednn_linear(pad_rows(rows), weight, bias)
    return functional.linear(rows, weight, bias)


def padded_rows(rows: int) -> int:
    """Round a number of rows up so that few shapes occur: oneDNN compiles and keeps a kernel for each.

    Up to 8 as they are, then to multiples of 4 (up to 64), 8 (up to 256) and 32.
    """
    step = 1 if rows <= 8 else 4 if rows <= 64 else 8 if rows <= 256 else 32
    return -(-rows // step) * step


def pad_rows(rows: Tensor) -> Tensor:
    """`rows` `[rows, in]` and so many zeros that they are `padded_rows`."""
    missing = padded_rows(rows.shape[0]) - rows.shape[0]
    return functional.pad(rows, (0, 0, 0, missing)) if missing else rows


@contextmanager
def dot_products(dtype: torch.dtype, row_counts: Sequence[int]) -> Iterator[None]:
    """Inside, `linear` gives single rows of bfloat16 to torch's dot products, whatever rows the other products have.

    torch prefers oneDNN even then, and only a switch of the whole process tells it otherwise: other Python threads
    that multiply bfloat16 or float32 meanwhile do so without oneDNN.
    """
    if dtype != torch.bfloat16 or 1 not in row_counts or not onednn_bfloat16() or not mkldnn.enabled:
        yield
        return
    mkldnn.set_flags(False)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:  # also if another thread did the same meanwhile
        mkldnn.set_flags(True)  # type: ignore[no-untyped-call]


@cache
def onednn_bfloat16() -> bool:
    """Whether oneDNN multiplies bfloat16 on this CPU."""
    return has_onednn_linear() and onednn_has_bfloat16()


def has_onednn_linear() -> bool:
    """Whether this build of torch has oneDNN, whose linear layer the public interface does not give to float32."""
    return bool(mkldnn.is_available())  # type: ignore[no-untyped-call]


def can_pack(dtype: torch.dtype) -> bool:
    """Whether weights of that type can be packed for oneDNN, which multiplies them on this CPU."""
    return has_onednn_linear() and (dtype == torch.float32 or (dtype == torch.bfloat16 and onednn_bfloat16()))
