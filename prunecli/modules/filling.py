"""Where a checkpoint's tensors belong in a model, and how they get there: chunk by chunk into their final place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from prunecli.architectures import Architecture
from prunecli.errors import CheckpointError
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.mixtures import SparseLayer
from prunecli.modules.attention import module_name
from prunecli.modules.define import has_module
from prunecli.modules.sparse_ffn import Router

CHUNK_BYTES = 16 << 20
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
}
"""safetensors' names of types -> torch's."""

STOCK_ROUTER = ".router.classifier"
"""Ending of a stock router's name; `SparseFFN` has it as `router`."""


@dataclass(frozen=True)
class Place:
    """Where a tensor of the checkpoint belongs: an attribute of a module.

    Attributes:
        name: in the checkpoint.
        module: that holds it.
        attribute: of the module: a parameter or a buffer, of the right shape.
        dtype: that the model runs it in.
    """

    name: str
    module: nn.Module
    attribute: str
    dtype: torch.dtype

    @property
    def held(self) -> Tensor:
        """What is there now."""
        tensor: Tensor = getattr(self.module, self.attribute)
        return tensor

    def put(self, tensor: Tensor) -> None:
        """Have the module hold `tensor`."""
        if self.attribute in self.module._buffers:
            self.module._buffers[self.attribute] = tensor
        else:
            parameter = nn.Parameter(tensor, requires_grad=self.held.requires_grad)
            self.module._parameters[self.attribute] = parameter


def places(model: Any, checkpoint: Checkpoint, names: Iterable[str], dtype: torch.dtype) -> Iterator[Place]:
    """The places of tensors, in a model whose floating tensors are in `dtype`; none for those of another task's head.

    Experts of a sparse layer lie in stacked parameters: they have no place of their own.

    Raises:
        CheckpointError: the model has no place for one, or one of another shape.
    """
    for name in names:
        owner, _, attribute = module_name(model, name).rpartition(".")
        owner = owner.removesuffix(STOCK_ROUTER) + ".router" if owner.endswith(STOCK_ROUTER) else owner
        try:
            module = model.get_submodule(owner)
            held = getattr(module, attribute)
        except AttributeError:
            layout = checkpoint.layout
            if layout.is_extra(name) or _lacks_output(model, layout.family, name):
                continue  # another class of the family has it
            raise CheckpointError(
                f"{checkpoint.path}: the model has no place for the tensor {name}"
            ) from None
        _require_shape(held, checkpoint, name)
        kind = held.dtype
        if kind.is_floating_point and not isinstance(module, Router):
            kind = _dtype_of(model, owner, dtype)
        yield Place(name, module, attribute, kind)


def expert_names(layers: Iterable[SparseLayer]) -> set[str]:
    """The names of all tensors of all experts."""
    return {
        layer.expert_tensor(number, suffix)
        for layer in layers
        for number in range(layer.num_experts)
        for suffix in layer.expert_tensors
    }


def fill(place: Tensor, checkpoint: Checkpoint, name: str, buffer: bytearray) -> None:
    """Read a tensor chunk by chunk into `place`, which may have another type or lie on another device.

    Raises:
        CheckpointError: it cannot be read, or is of another shape or of a type that no model runs in.
    """
    info = checkpoint.info(name)
    _require_shape(place, checkpoint, name)
    if info.dtype not in DTYPES:
        raise CheckpointError(
            f"{checkpoint.path}: {name} is of the type {info.dtype}, which no model runs in"
        )
    source = DTYPES[info.dtype]
    flat = place.detach().view(-1)
    for start in range(0, info.nbytes, CHUNK_BYTES):
        end = min(start + CHUNK_BYTES, info.nbytes)
        values = torch.frombuffer(checkpoint.read_range(name, start, end, buffer), dtype=source)
        flat[start // source.itemsize : end // source.itemsize].copy_(values)


def fill_places(found: Iterable[Place], checkpoint: Checkpoint, device: torch.device) -> None:
    """Read tensors into new memory on `device`."""
    buffer = bytearray(CHUNK_BYTES)
    for place in found:
        made = torch.empty(place.held.shape, dtype=place.dtype, device=device)
        fill(made, checkpoint, place.name, buffer)
        place.put(made)


def _require_shape(place: Tensor, checkpoint: Checkpoint, name: str) -> None:
    stored = checkpoint.info(name).shape
    if tuple(place.shape) != stored:
        raise CheckpointError(
            f"{checkpoint.path}: {name} has the shape {list(stored)}, the model wants {list(place.shape)}"
        )


def _lacks_output(model: Any, family: Architecture, name: str) -> bool:
    """Whether the tensor is of the output layer, and the model of a class without one."""
    if family.embedding is None or not name.startswith(f"{family.embedding.output}."):
        return False
    return not has_module(model, module_name(model, family.embedding.output))


def _dtype_of(model: Any, module: str, dtype: torch.dtype) -> torch.dtype:
    """float32 where the stock class keeps it because float16 overflows (T5), else `dtype`."""
    kept = set(getattr(model, "_keep_in_fp32_modules", None) or ()) if dtype == torch.float16 else set()
    return torch.float32 if kept & set(module.split(".")) else dtype
