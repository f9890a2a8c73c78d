"""Linear layers in int8 on a CPU: weights by output channel, activations by row as they come; no gradients.

With a row's largest magnitude a and a channel's b, x ~ (u - 128) a / 127 and W ~ v b / 127:

    x W^T = (u v^T - 128 sum(v)) a b / 127^2

u is unsigned, since only then the products of bytes of processors without matrix units (AVX-512 VNNI) take them as they
are; what the 128 adds is known with the weights. oneDNN sums the products in int32, exactly. A row's values depend on
that row alone, so that a sentence is translated alike in every batch.

Measured on an AMD EPYC, one thread: a weight of 1024 x 1024 is multiplied by 5 rows in 0.05 ms, 20 GB/s, and 0.02 go to
all else.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from prunecli.errors import UnsupportedModelError, UsageError
from prunecli.model.checkpoint import Checkpoint
from prunecli.modules.cpu_linear import InferenceLinear, has_onednn_linear, pad_rows
from prunecli.modules.filling import Destination, tensors_of
from prunecli.modules.grouped import Dispatch, Span, by_expert, pays
from prunecli.modules.sparse_ffn import EXPERT_PARTS, SparseFFN
from prunecli.private import cpu_has, int8_linear, int8_packed

LARGEST = 127
"""Of a magnitude, in units of its scale."""

MIDDLE = 128
"""What stands for 0 among unsigned bytes."""

BLOCK_ROWS = 1024
"""Rows of a weight that are rounded at a time."""

_LARGEST = torch.tensor(float(LARGEST), device="cpu")
_WHOLE = float(2**23 + MIDDLE)
"""From 2^23 on float32 has whole numbers alone: a sum with it rounds, and its lowest byte is what was added to 2^23."""


@dataclass(frozen=True, eq=False)
class Int8Matrix:
    """A weight `[out, in]`.

    Attributes:
        values: v, int8, in oneDNN's blocks: opaque, but for the type and the number of elements.
        scale: `[out]` float32: b / 127^2.
        offset: `[out]` float32: -128 sum(v) b / 127^2.
    """

    values: Tensor
    scale: Tensor
    offset: Tensor


class Int8Linear(nn.Linear):
    """An `nn.Linear` for inference; its `weight` is opaque, its bias float32.

    Attributes:
        is_copy: whether the model has the weight in another type too, as a table of embeddings.
    """

    matrix: Int8Matrix
    is_copy = False

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (the name that nn.Linear gives it)
        """Map `[..., in]` to `[..., out]`.

        Raises:
            RuntimeError: gradients are wanted, which int8 does not let through.
        """
        return int8_product(input, self.matrix, self.bias)


class Int8SparseFFN(SparseFFN):
    """A `SparseFFN` for inference; `fc1_weight` and `fc2_weight` are lists of opaque weights, one an expert.

    Attributes:
        matrices: of each expert.
    """

    matrices: list[tuple[Int8Matrix, Int8Matrix]]

    def _outputs(self, rows: Tensor, plan: Dispatch) -> Tensor:
        def run(span: Span, own: Tensor) -> Tensor:
            expert = span[0]
            first, second = self.matrices[expert]
            hidden = self.act_fn(int8_product(pad_rows(own), first, self.fc1_bias[expert]))
            return int8_product(hidden, second, self.fc2_bias[expert])[: len(own)]

        return by_expert(run, rows, plan, shared_out=pays(plan.sizes, 2 * self.d_model * self.ffn_dim, 1))


def int8_product(rows: Tensor, matrix: Int8Matrix, bias: Tensor | None) -> Tensor:
    """`rows W^T + b`, each row rounded to bytes by its own largest magnitude.

    Args:
        rows: `[..., in]` float32.
        matrix: W `[out, in]`.
        bias: `[out]` float32, or None.

    Returns:
        `[..., out]` float32.

    Raises:
        RuntimeError: gradients are wanted.
    """
    if rows.requires_grad and torch.is_grad_enabled():
        raise RuntimeError("a model in int8 has no gradients: load it in another type")
    if not rows.numel():
        return rows.new_zeros(*rows.shape[:-1], len(matrix.scale))
    # Every step is one that torch vectorises: a norm, fused sums of broadcast rows and a cast of floats to uint8 take 5
    # to 20 times as long. 0 / 0 of a row of zeros is no number and some byte; times the row's magnitude it is 0 again.
    largest = rows.abs().amax(-1, keepdim=True)
    whole = (rows * torch.div(_LARGEST, largest)).add_(_WHOLE)
    values = whole.view(torch.int32).to(torch.uint8)
    product = int8_linear(values, matrix.values, matrix.scale, matrix.offset)
    product.mul_(largest)
    return product if bias is None else product.add_(bias)


def quantise(weight: Tensor) -> Int8Matrix:
    """The matrix of `weight` `[out, in]`: each row rounded by its own largest magnitude; a row of zeros stays one."""
    values = torch.empty(weight.shape, dtype=torch.int8)
    scale, sums = torch.empty(len(weight)), torch.empty(len(weight))
    for start in range(0, len(weight), BLOCK_ROWS):  # what is made on the way is small
        block = slice(start, start + BLOCK_ROWS)
        part = weight[block].float()
        largest = part.abs().amax(1)
        values[block] = part.mul(LARGEST / largest.where(largest != 0, 1)[:, None]).round_()
        scale[block], sums[block] = largest / LARGEST**2, values[block].sum(1)
    packed = int8_packed(values)
    return Int8Matrix(packed, scale, -MIDDLE * sums * scale)


def takes_int8(module: nn.Module) -> bool:
    """Whether `module` is a linear layer as the stock classes have them; a router is none."""
    return type(module) in (nn.Linear, InferenceLinear) or is_turned(module)


def is_turned(module: nn.Module) -> bool:
    """Whether it is GPT-2's linear layer, whose weight is `[in, out]`."""
    from transformers.pytorch_utils import Conv1D

    return type(module) is Conv1D


def linear_to_int8(module: nn.Module, weight: Tensor) -> Int8Linear:
    """Make a linear layer an `Int8Linear` of these weights, in its place; the bias stays.

    Args:
        module: for which `takes_int8`.
        weight: as the module has it: `[out, in]`, or `[in, out]` of a turned one.
    """
    matrix = quantise(weight.T if is_turned(module) else weight)
    module.__class__ = Int8Linear
    assert isinstance(module, Int8Linear)
    module.in_features, module.out_features = matrix.values.shape
    module.weight, module.matrix = nn.Parameter(matrix.values, requires_grad=False), matrix
    return module


def linears_to_int8(model: nn.Module) -> None:
    """Make the linear layers that are left `Int8Linear`s, in their places: those that share a table of embeddings.

    The table stays as it is for those who look tokens up in it.
    """
    for module in model.modules():
        if takes_int8(module):
            assert isinstance(module.weight, Tensor)
            linear_to_int8(module, module.weight.detach()).is_copy = True


def require_int8(device: torch.device, checkpoints: Iterable[Checkpoint]) -> None:
    """Refuse where products of bytes do not run fast, or not exactly, and mixtures that prunecli does not run.

    Raises:
        UsageError: another device than a CPU, or one without the instructions.
        UnsupportedModelError: a mixture whose experts transformers runs.
    """
    if device.type != "cpu":
        raise UsageError(
            f"`dtype=int8` is for CPUs, not for {device}", "Add `device=cpu`, or choose another type."
        )
    if not multiplies_bytes():
        raise UsageError(
            "`dtype=int8`: this processor, or this build of torch, has no products of bytes (AVX-512 VNNI, AMX)",
            "Choose bfloat16 or float32.",
        )
    for checkpoint in checkpoints:
        if checkpoint.runs_stock and checkpoint.family is not None:
            raise UnsupportedModelError(
                f"{checkpoint.path}: `dtype=int8` is not for mixtures of type {checkpoint.model_type}: transformers "
                "runs their experts",
                "Choose bfloat16 or float32.",
            )


@cache
def multiplies_bytes() -> bool:
    """Whether this CPU has products of bytes; older processors add up pairs of products in 16 bits, which overflow."""
    return has_onednn_linear() and cpu_has("vnni", "amx_tile")


def read_int8_experts(model: Any, checkpoint: Checkpoint) -> None:
    """Every expert of the sparse FFNs, which become `Int8SparseFFN`s; biases in float32."""
    for mixture in checkpoint.mixtures:
        module = model.get_submodule(mixture.name)
        module.__class__ = Int8SparseFFN
        matrices = []
        for part, suffix in EXPERT_PARTS.items():
            names = [mixture.expert_tensor(expert, suffix) for expert in range(mixture.num_experts)]
            tensors = tensors_of(checkpoint, names, torch.float32)
            if part.endswith("weight"):
                matrices.append([quantise(tensor) for tensor in tensors])
                own = (nn.Parameter(matrix.values, requires_grad=False) for matrix in matrices[-1])
                delattr(module, part)
                setattr(module, part, nn.ParameterList(own))
            else:
                biases = torch.stack([*tensors])
                setattr(module, part, nn.Parameter(biases, requires_grad=False))
        module.matrices = [*zip(*matrices, strict=True)]


def put_int8(target: Destination, tensor: Tensor) -> None:
    """Have a module hold `tensor`; the weight of a linear layer, which becomes an `Int8Linear`, in int8."""
    if target.attribute == "weight" and takes_int8(target.module):
        linear_to_int8(target.module, tensor)
    else:
        target.put(tensor)
