"""Quantised matrices of every scheme, made value by value, with the values that they stand for."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
"""The column of eight that lies in the first four bits of a word, in the next, …"""


@dataclass(frozen=True)
class Quantised:
    """One matrix.

    Attributes:
        parts: its tensors, by their names in the module.
        values: `[outputs, inputs]` float32 that they stand for.
    """

    parts: dict[str, Tensor]
    values: Tensor


def packed(numbers: Tensor, bits: int) -> Tensor:
    """`[rows, n]` numbers without a sign, one after another in int32 words from the lowest bits: `[rows, words]`."""
    places = torch.arange(0, 32, bits)
    words = functional.pad(numbers, (0, -numbers.shape[1] % len(places))).unflatten(1, (-1, len(places)))
    return (words << places).sum(dim=2).int()  # of 32 bits the highest is the sign


def float8(values: Tensor, block: tuple[int, int], scale_name: str = "weight_scale_inv") -> Quantised:
    """A scale for every block of rows and columns; the last blocks may be smaller."""
    rows, columns = values.shape
    down, across = -(-rows // block[0]), -(-columns // block[1])
    scale = torch.zeros(down, across)
    stored = torch.zeros(rows, columns)
    found = torch.zeros(rows, columns)
    for i in range(down):
        for j in range(across):
            where = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
            scale[i, j] = values[where].abs().max() / 448
            stored[where] = (values[where] / scale[i, j]).to(torch.float8_e4m3fn).float()
            found[where] = stored[where] * scale[i, j]
    return Quantised({"weight": stored.to(torch.float8_e4m3fn), scale_name: scale}, found)


def int8(values: Tensor) -> Quantised:
    """bitsandbytes: 127 is the greatest of a row."""
    most = values.abs().amax(1)
    stored = (values / most[:, None] * 127).round().to(torch.int8)
    return Quantised({"weight": stored, "SCB": most}, stored.float() * (most / 127)[:, None])


def _groups(
    values: Tensor, size: int, bits: int, *, ordered: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Numbers `[outputs, inputs]`, zero points and scales `[outputs, groups]`, any that could be; groups `[inputs]`."""
    generator, (outputs, inputs) = torch.Generator().manual_seed(0), values.shape
    group = torch.arange(inputs) // size
    shape = outputs, int(group[-1]) + 1
    numbers = torch.randint(0, 1 << bits, (outputs, inputs), generator=generator)
    zeros = torch.randint(1, 1 << bits, shape, generator=generator)
    scales = (torch.rand(shape, generator=generator) * 0.1 + 0.01).half().float()
    return numbers, zeros, scales, group[torch.randperm(inputs, generator=generator)] if ordered else group


def gptq(
    values: Tensor, size: int, bits: int = 4, *, ordered: bool = False, newer: bool = False
) -> Quantised:
    """`[inputs, outputs]`, words along the inputs; the first format stores zero points less one."""
    numbers, zeros, scales, group = _groups(values, size, bits, ordered=ordered)
    found = scales[:, group] * (numbers - zeros[:, group])
    stored = zeros if newer else zeros - 1
    parts = {
        "qweight": packed(numbers, bits).T.contiguous(),
        "qzeros": packed(stored.T, bits),
        "scales": scales.T.contiguous().half(),
        "g_idx": group.int(),
    }
    return Quantised(parts, found)


def awq(values: Tensor, size: int) -> Quantised:
    """`[inputs, outputs]`, words along the outputs in an order of their own."""
    numbers, zeros, scales, group = _groups(values, size, 4)

    def words(rows: Tensor) -> Tensor:
        eights = rows.reshape(len(rows), -1, 8)
        return packed(torch.stack([eights[:, :, c] for c in AWQ_COLUMNS], 2).reshape(len(rows), -1), 4)

    parts = {"qweight": words(numbers.T), "qzeros": words(zeros.T), "scales": scales.T.contiguous().half()}
    return Quantised(parts, scales[:, group] * (numbers - zeros[:, group]))


def compressed(
    values: Tensor, size: int, bits: int = 4, *, symmetric: bool = True, ordered: bool = False
) -> Quantised:
    """compressed-tensors' pack-quantized: numbers with a sign, half of their range added; zero points along rows."""
    numbers, zeros, scales, group = _groups(values, size, bits, ordered=ordered)
    half = 1 << (bits - 1)
    points = torch.full_like(zeros, half) if symmetric else zeros
    parts = {
        "weight_packed": packed(numbers, bits),
        "weight_scale": scales.bfloat16(),
        "weight_shape": torch.tensor(values.shape),
    }
    if not symmetric:
        parts["weight_zero_point"] = packed(zeros.T, bits).T.contiguous()
    if ordered:
        parts["weight_g_idx"] = group.int()
    exact = scales.bfloat16().float()
    return Quantised(parts, exact[:, group] * ((numbers - half) - (points - half)[:, group]))


def _e2m1(codes: Tensor) -> Tensor:
    return torch.tensor([-E2M1[c - 8] if c >= 8 else E2M1[c] for c in codes.flatten().tolist()]).view(
        codes.shape
    )


def nvfp4(values: Tensor, *, modelopt: bool) -> Quantised:
    """Floats of four bits, a scale of eight for every 16, and one for all."""
    generator = torch.Generator().manual_seed(0)
    rows, columns = values.shape
    codes = torch.randint(0, 16, (rows, columns), generator=generator)
    scale = (torch.rand(rows, columns // 16, generator=generator) * 100 + 1).to(torch.float8_e4m3fn)
    stored = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
    spread = scale.float().repeat_interleave(16, 1)
    if modelopt:
        whole = torch.tensor(0.0009765625)
        parts = {
            "weight": stored,
            "weight_scale": scale,
            "weight_scale_2": whole,
            "input_scale": torch.tensor(1.0),
        }
        return Quantised(parts, _e2m1(codes) * (spread * whole))
    whole = torch.tensor([1024.0])
    parts = {"weight_packed": stored, "weight_scale": scale, "weight_global_scale": whole}
    return Quantised(parts, _e2m1(codes) * (spread / whole))


def mxfp4(shape: tuple[int, int, int]) -> Quantised:
    """A stack `[experts, inputs, outputs]`: floats of four bits, a power of two for every 32 inputs."""
    experts, inputs, outputs = shape
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (experts, outputs, inputs), generator=generator)
    exponents = torch.randint(121, 126, (experts, outputs, inputs // 32), generator=generator)
    stored = (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)
    scale = 2.0 ** (exponents - 127.0)
    found = _e2m1(codes) * scale.repeat_interleave(32, 2)
    parts = {"blocks": stored.view(experts, outputs, inputs // 32, 16), "scales": exponents.to(torch.uint8)}
    return Quantised(parts, found.transpose(1, 2).contiguous())


def _weights(bits: int, size: int, **more: object) -> dict[str, object]:
    weights = {"num_bits": bits, "type": "int", "group_size": size, "strategy": "group", **more}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}}


SCHEMES = {
    "fp8": (lambda w: float8(w, (16, 16)), {"quant_method": "fp8", "weight_block_size": [16, 16]}),
    "fp8 by row": (
        lambda w: float8(w, (1, w.shape[1]), "weight_scale"),
        {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {}},
    ),
    "int8": (int8, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    "gptq": (lambda w: gptq(w, 16), {"quant_method": "gptq", "bits": 4, "group_size": 16}),
    "gptq, ordered": (
        lambda w: gptq(w, 16, ordered=True, newer=True),
        {"quant_method": "gptq", "bits": 4, "group_size": 16, "checkpoint_format": "gptq_v2"},
    ),
    "gptq, 8 bits": (lambda w: gptq(w, 32, 8), {"quant_method": "gptq", "bits": 8, "group_size": 32}),
    "awq": (lambda w: awq(w, 16), {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm"}),
    "packed": (lambda w: compressed(w, 32), _weights(4, 32)),
    "packed, with zero points": (
        lambda w: compressed(w, 16, symmetric=False, ordered=True),
        _weights(4, 16, symmetric=False, actorder="group"),
    ),
    "packed, 8 bits": (lambda w: compressed(w, 16, 8), _weights(8, 16)),
    "nvfp4": (lambda w: nvfp4(w, modelopt=False), {"quant_method": "compressed-tensors"}),
    "nvfp4 of modelopt": (
        lambda w: nvfp4(w, modelopt=True),
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    ),
}
"""Name -> how a matrix is quantised, and what config.json then says."""
