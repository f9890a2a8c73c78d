"""One linear layer on one CPU thread, for the ragged numbers of rows that experts get; no gradients.

torch's own choices are best for large even products. Measured on AVX-512 for 64 rows by 1024 x 4096, in percent of a
large product's speed: float32 by MKL 78, by oneDNN 94; float16 without native float16 arithmetic 1 to 5, cast to
float32 block by block 80.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

MIN_ONEDNN = 1 << 20
"""Weights from which float32 products go to oneDNN, which compiles about 0.5 ms for each new shape."""

CAST_ELEMENTS = 1 << 20
"""Float16 weights cast at a time: 4 MiB in float32 on each thread."""

FEW_ROWS = 3
"""Up to these rows, torch's dot products on float16 are faster than a cast."""


def linear(rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """`rows W^T + b`, possibly followed by rows to be ignored, possibly in float32 where the weight is float16.

    Args:
        rows: `[rows, in]`, in the type of the weight or in float32.
        weight: `[out, in]`, contiguous.
        bias: `[out]`.

    Returns:
        `[at least rows, out]`.
    """
    if weight.dtype == torch.float16 and not _native_float16():
        return _linear_float16(rows, weight, bias)
    if weight.dtype == torch.float32:
        return _linear_float32(rows, weight, bias)
    return functional.linear(_padded(rows), weight, bias)


def padded_rows(rows: int) -> int:
    """Round a number of rows up so that few shapes occur: oneDNN compiles and keeps a kernel for each.

    Up to 8 as they are, then to multiples of 4 (up to 64), 8 (up to 256) and 32.
    """
    step = 1 if rows <= 8 else 4 if rows <= 64 else 8 if rows <= 256 else 32
    return -(-rows // step) * step


def _padded(rows: Tensor) -> Tensor:
    missing = padded_rows(rows.shape[0]) - rows.shape[0]
    return functional.pad(rows, (0, 0, 0, missing)) if missing else rows


def _linear_float32(rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    if weight.numel() < MIN_ONEDNN or not _has_onednn_linear():
        return functional.linear(rows, weight, bias)
    result: Tensor = torch.ops.mkldnn._linear_pointwise(_padded(rows), weight, bias, "none", [], "")
    return result


def _linear_float16(rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    if rows.shape[0] <= FEW_ROWS:
        return functional.linear(rows.half(), weight, bias)
    rows = _padded(rows).float()
    step = max(1, CAST_ELEMENTS // weight.shape[1])
    starts = range(0, weight.shape[0], step)
    blocks = ((weight[start : start + step].float(), bias[start : start + step].float()) for start in starts)
    return torch.cat([_linear_float32(rows, *block) for block in blocks], dim=1)


@cache
def _native_float16() -> bool:
    """Whether oneDNN multiplies float16 on this CPU."""
    supported = getattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", None)
    return bool(supported is not None and supported())


@cache
def _has_onednn_linear() -> bool:
    """Whether this build of torch has oneDNN's linear layer, which the public interface gives float32 no way to."""
    available = bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
    return available and hasattr(torch.ops.mkldnn, "_linear_pointwise")
