"""A model whose layers' weights stay on disk: what is held throughout, and what a layer and an expert are made of."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from prunecli.architectures.records import Side
from prunecli.errors import UsageError
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.patchwork import module_name
from prunecli.model.sparse_layer import SparseLayer
from prunecli.modules import building
from prunecli.modules.filling import Destination, destinations, expert_names, fill
from prunecli.modules.sparse_ffn import EXPERT_PARTS, SparseFFN
from prunecli.modules.stock_model import (
    StockExperts,
    compute_buffers,
    make_stock_model,
    refused_by_layer,
    tie,
)
from prunecli.modules.stock_names import REMEDY

ALIGNMENT = 64
"""Bytes at whose multiples a tensor begins in a buffer."""

STOCK_ATTENTION = "self_attn"
"""The attention of a layer, in transformers' decoders."""


@dataclass(frozen=True)
class Spec:
    """One tensor to be read.

    Attributes:
        name: in the checkpoint.
        shape: of the tensor.
        dtype: that it is computed in.
        more: names of those in the checkpoint whose rows follow, in one tensor with it.
        entry: number along the first axis of that in the checkpoint; None: all of it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    more: tuple[str, ...] = ()
    entry: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that it takes in a buffer."""
        size = torch.Size(self.shape).numel() * self.dtype.itemsize
        return -(-size // ALIGNMENT) * ALIGNMENT


Block = tuple[Spec, ...]
"""What is read, and held, together: a layer without its experts, or one expert."""


def block_of(targets: Iterable[Destination]) -> Block:
    """The tensors that belong there."""
    return tuple(Spec(target.name, tuple(target.tensor.shape), target.dtype) for target in targets)


def block_bytes(block: Block) -> int:
    """Bytes that a block takes in a buffer."""
    return sum(spec.nbytes for spec in block)


@dataclass(frozen=True)
class Stage:
    """One layer of the model.

    Attributes:
        name: as in the checkpoint.
        side: of which stack.
        module: the layer.
        targets: where its tensors belong, without experts and without what other layers share.
        attentions: its attention modules.
        sparse: its mixture of experts, or None.
        ffn: the module of that mixture, or None.
        stock: where the experts alone are declared, those of the layer, or None.
    """

    name: str
    side: Side
    module: nn.Module
    targets: tuple[Destination, ...]
    attentions: tuple[nn.Module, ...]
    sparse: SparseLayer | None
    ffn: SparseFFN | None
    stock: StockExperts | None = None

    @property
    def block(self) -> Block:
        """The tensors of `targets`."""
        return block_of(self.targets)

    def expert(self, number: int) -> Block:
        """The tensors of one expert, as it is numbered in the checkpoint: fc1's weight and bias, fc2's.

        Of a stock class in the order of `ExpertWeights`.
        """
        if self.stock is not None:
            return tuple(_stock_expert(self.stock, number))
        assert self.sparse is not None and self.ffn is not None  # noqa: PT018
        found = []
        for attribute, suffix in EXPERT_PARTS.items():
            stacked = getattr(self.ffn, attribute)
            found.append(
                Spec(self.sparse.expert_tensor(number, suffix), tuple(stacked.shape[1:]), stacked.dtype)
            )
        return tuple(found)


@dataclass(frozen=True)
class Skeleton:
    """A model on the meta device, and where its tensors belong.

    Attributes:
        model: of the family's stock class, every sparse FFN a `SparseFFN`, in evaluation mode.
        stages: its layers, in the order in which they run.
        resident: every other tensor that the checkpoint holds.
        device: where it is to run.
    """

    model: Any
    stages: tuple[Stage, ...]
    resident: tuple[Destination, ...]
    device: torch.device

    @property
    def is_stock(self) -> bool:
        """Whether it is of a mixture that runs in its stock class."""
        return any(stage.stock is not None for stage in self.stages)

    @property
    def resident_bytes(self) -> int:
        """Bytes that are held throughout."""
        return block_bytes(block_of(self.resident))

    @property
    def widest_bytes(self) -> int:
        """Bytes of the largest block."""
        blocks = [stage.block for stage in self.stages]
        blocks += [stage.expert(0) for stage in self.stages if stage.ffn or stage.stock]
        return max(map(block_bytes, blocks))


def make_skeleton(
    checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, *, output: bool = False
) -> Skeleton:
    """The model without a single weight, its floating tensors to be in `dtype` (routers in float32).

    Args:
        output: of a mixture that runs in its stock class, whether its output layer is held too, as of others it is.

    Raises:
        UnsupportedModelError: the family is not declared, nor its experts.
        CheckpointError: a tensor is missing, unexpected or misshapen.
    """
    if checkpoint.runs_stock:
        return _make_stock_skeleton(checkpoint, device, dtype, output=output)
    model = building.assemble(checkpoint, device, dtype)
    sparse = checkpoint.mixtures
    stages = tuple(_stages(model, checkpoint, sparse, dtype))
    taken = {target.name for stage in stages for target in stage.targets} | expert_names(sparse)
    rest = [name for name in checkpoint.tensors if name not in taken]
    resident = tuple(destinations(model, checkpoint, rest, dtype))
    return Skeleton(model.eval(), stages, resident, device)


def _make_stock_skeleton(
    checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, *, output: bool
) -> Skeleton:
    if checkpoint.family is None:
        raise UsageError(f"--memory: {refused_by_layer(checkpoint)}", REMEDY)
    made = make_stock_model(checkpoint, dtype, output=output)
    stages = []
    for path, module in made.layers:
        stock = next((held for name, held in made.experts.items() if name.startswith(f"{path}.")), None)
        targets = tuple(target for place, target in made.targets if place.startswith(f"{path}."))
        attention = tuple(part for name, part in module.named_children() if name == STOCK_ATTENTION)
        sparse = None if stock is None else stock.layer
        stages.append(Stage(path, "decoder", module, targets, attention, sparse, None, stock))
    layered = {target.name for stage in stages for target in stage.targets}
    resident = tuple(target for _, target in made.targets if target.name not in layered)
    return Skeleton(made.model, tuple(stages), resident, device)


def fill_resident(skeleton: Skeleton, checkpoint: Checkpoint) -> None:
    """Read what is held throughout, tie what is tied, compute what is computed.

    Raises:
        CheckpointError: a tensor cannot be read, or the checkpoint lacks one.
    """
    fill(skeleton.resident, checkpoint, skeleton.device)
    if skeleton.is_stock:
        tie(skeleton.model)
        compute_buffers(skeleton.model, skeleton.device)
        return
    layered = {id(target.tensor) for stage in skeleton.stages for target in stage.targets}
    layered |= {
        id(getattr(stage.ffn, part))
        for stage in skeleton.stages
        if stage.ffn is not None
        for part in EXPERT_PARTS
    }
    building.complete(skeleton.model, checkpoint, skeleton.device, layered)


def _stock_expert(experts: StockExperts, number: int) -> Iterator[Spec]:
    """The tensors of one expert, in the order of `ExpertWeights`."""
    for part in experts.parts:
        stacked = getattr(experts.module, part.attribute)
        shape = tuple(stacked.shape[1:])
        if part.is_stacked:
            yield Spec(part.sources[0], shape, stacked.dtype, entry=number)
            continue
        first, *more = (source.format(expert=number) for source in part.sources)
        yield Spec(first, shape, stacked.dtype, tuple(more))


def _stages(
    model: Any,
    checkpoint: Checkpoint,
    sparse: Sequence[SparseLayer],
    dtype: torch.dtype,
) -> Iterator[Stage]:
    family, experts = checkpoint.require_architecture(), expert_names(sparse)
    mixtures = {(layer.side, layer.layer): layer for layer in sparse}
    layers = [
        (stack, number, stack.layers.format(layer=number))
        for stack in family.stacks
        for number in range(checkpoint.layout.sizes.depth(stack))
    ]
    names = _by_layer(checkpoint, [name for _, _, name in layers])
    modules = {name: model.get_submodule(module_name(model, name)) for _, _, name in layers}
    shared = _shared(modules.values())
    for stack, number, name in layers:
        mixture = mixtures.get((stack.side, number))
        own = destinations(model, checkpoint, [held for held in names[name] if held not in experts], dtype)
        yield Stage(
            name,
            stack.side,
            modules[name],
            tuple(target for target in own if id(target.module) not in shared),
            tuple(modules[name].get_submodule(attention.name) for attention in stack.attentions),
            mixture,
            model.get_submodule(module_name(model, mixture.name)) if mixture else None,
        )


def _by_layer(checkpoint: Checkpoint, layers: Sequence[str]) -> dict[str, list[str]]:
    """The names of each layer's tensors."""
    found: dict[str, list[str]] = {layer: [] for layer in layers}
    pattern = re.compile("|".join(re.escape(layer) + r"(?=\.)" for layer in layers))
    for name in checkpoint.tensors:
        if match := pattern.match(name):
            found[match[0]].append(name)
    return found


def _shared(layers: Iterable[nn.Module]) -> set[int]:
    """Ids of the modules that more than one layer holds: a shared FFN."""
    held = Counter(id(module) for layer in layers for module in layer.modules())
    return {module for module, times in held.items() if times > 1}
