"""A model whose layers' weights stay on disk: what is held throughout, and what a layer and an expert are made of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from prunecli.architectures.records import Side
from prunecli.errors import UsageError
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.patchwork import module_name
from prunecli.model.sparse_layer import SparseLayer
from prunecli.modules import building
from prunecli.modules.cpu_linear import dot_products
from prunecli.modules.filling import Destination, destinations, expert_names, fill
from prunecli.modules.grouped import threads_pay
from prunecli.modules.sparse_ffn import EXPERT_PARTS, SparseFFN
from prunecli.modules.stock_experts import ExpertWeights, run_expert
from prunecli.modules.stock_model import (
    ExpertPart,
    compute_buffers,
    make_stock_model,
    refused_by_layer,
    tie,
)
from prunecli.modules.stock_names import REMEDY

ALIGNMENT = 64
"""A tensor begins in a buffer at a multiple of this number of bytes."""

STOCK_ATTENTION = "self_attn"
"""The attention of a layer, in transformers' decoders."""


@dataclass(frozen=True)
class Spec:
    """One tensor to be read.

    Attributes:
        names: of the tensors in the checkpoint whose rows, one after another, make it up.
        shape: of the tensor.
        dtype: that it is computed in.
        entry: number along the first axis of the one tensor in the checkpoint; None: all of it.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    entry: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that it takes in a buffer."""
        size = torch.Size(self.shape).numel() * self.dtype.itemsize
        return -(-size // ALIGNMENT) * ALIGNMENT


Block = tuple[Spec, ...]
"""What is read, and held, together: a layer without its experts, or one expert."""


def block_of(targets: Iterable[Destination]) -> Block:
    """The tensors that belong to `targets`."""
    return tuple(Spec((target.name,), tuple(target.tensor.shape), target.dtype) for target in targets)


def block_bytes(block: Block) -> int:
    """Bytes that a block takes in a buffer."""
    return sum(spec.nbytes for spec in block)


@dataclass(frozen=True)
class Mixture:
    """The experts of a layer, which are read one at a time.

    Attributes:
        layer: as the checkpoint has it.
        module: a `SparseFFN` or a stock class's module of experts, on the meta device; its attribute `runner`, if not
            None, computes the experts' outputs `[assignments, d_model]` from their rows and `Groups`.
        parts: its stacked parameters, in the order in which an expert is run with them.
    """

    layer: SparseLayer
    module: Any
    parts: tuple[ExpertPart, ...]

    @property
    def dtype(self) -> torch.dtype:
        """Type of the experts' outputs, in which rows and outputs are stored."""
        if isinstance(self.module, SparseFFN):
            return torch.float32
        found: torch.dtype = getattr(self.module, self.parts[0].attribute).dtype
        return found

    def block(self, expert: int) -> Block:
        """The tensors of one expert, as it is numbered in the checkpoint."""
        found = []
        for part in self.parts:
            stacked = getattr(self.module, part.attribute)
            names = tuple(name.format(expert=expert) for name in part.sources)
            entry = expert if part.is_stacked else None
            found.append(Spec(names, tuple(stacked.shape[1:]), stacked.dtype, entry))
        return tuple(found)

    def run(self, rows: Tensor, tensors: Sequence[Tensor]) -> Tensor:
        """One expert on its rows `[rows, d_model]`, by the kernels of a whole layer; no gradients.

        Args:
            tensors: of `block`.
        """
        if isinstance(self.module, SparseFFN):
            first, first_bias, second, second_bias = tensors
            return self.module.run_expert(rows, (first, first_bias, second, second_bias))
        with dot_products(rows.dtype, [len(rows)]):
            return run_expert(self.module, rows, ExpertWeights(*tensors))

    def shares_out(self, counts: Sequence[int]) -> bool:
        """Whether a CPU would give each expert to one thread if experts have this number of rows each."""
        first, second = (
            part for part in (getattr(self.module, part.attribute) for part in self.parts) if part.dim() > 2
        )
        return threads_pay((first, second), sum(count > 0 for count in counts), sum(counts))


@dataclass(frozen=True)
class Stage:
    """One layer of the model.

    Attributes:
        name: as in the checkpoint.
        side: of which stack.
        module: the layer.
        attentions: its attention modules.
        mixture: its experts, or None.
        targets: where its tensors belong, without experts and without what other layers share.
    """

    name: str
    side: Side
    module: nn.Module
    attentions: tuple[nn.Module, ...]
    mixture: Mixture | None
    targets: tuple[Destination, ...] = ()

    @property
    def block(self) -> Block:
        """The tensors of `targets`."""
        return block_of(self.targets)


@dataclass(frozen=True)
class Skeleton:
    """A model on the meta device, and where its tensors belong.

    Attributes:
        model: of the family's stock class, in evaluation mode.
        stages: its layers, in the order in which they run.
        resident: every other tensor that the checkpoint holds.
        device: where it is to run.
    """

    model: Any
    stages: tuple[Stage, ...]
    resident: tuple[Destination, ...]
    device: torch.device

    @property
    def resident_bytes(self) -> int:
        """Bytes that are held throughout."""
        return block_bytes(block_of(self.resident))

    @property
    def widest_bytes(self) -> int:
        """Bytes of the largest block."""
        blocks = [stage.block for stage in self.stages]
        blocks += [stage.mixture.block(0) for stage in self.stages if stage.mixture is not None]
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
        model, layers, targets = _stock_parts(checkpoint, dtype, output=output)
    else:
        model, layers, targets = _declared_parts(checkpoint, device, dtype)
    owners: dict[int, int | None] = {}  # a module that several layers share, such as an FFN, belongs to none
    for number, layer in enumerate(layers):
        for module in layer.module.modules():
            owners[id(module)] = None if id(module) in owners else number
    own: list[list[Destination]] = [[] for _ in layers]
    resident: list[Destination] = []
    for target in targets:
        owner = owners.get(id(target.module))
        (resident if owner is None else own[owner]).append(target)
    stages = tuple(replace(layer, targets=tuple(found)) for layer, found in zip(layers, own, strict=True))
    return Skeleton(model.eval(), stages, tuple(resident), device)


def fill_resident(skeleton: Skeleton, checkpoint: Checkpoint) -> None:
    """Read what is held throughout, tie what is tied, compute what is computed.

    Raises:
        CheckpointError: a tensor cannot be read, or the checkpoint lacks one.
    """
    fill(skeleton.resident, checkpoint, skeleton.device)
    if checkpoint.runs_stock:
        tie(skeleton.model)
        compute_buffers(skeleton.model, skeleton.device)
        return
    absent = {id(tensor) for stage in skeleton.stages for tensor in stage.module.parameters()}
    building.complete(skeleton.model, checkpoint, skeleton.device, absent)


Parts = tuple[Any, list[Stage], Iterable[Destination]]
"""A model on the meta device, its layers without targets, and where all tensors but the experts' belong."""


def _stock_parts(checkpoint: Checkpoint, dtype: torch.dtype, *, output: bool) -> Parts:
    if checkpoint.family is None and (refused := refused_by_layer(checkpoint)) is not None:
        raise UsageError(f"`memory`: {refused}", REMEDY)
    made = make_stock_model(checkpoint, dtype, output=output)
    layers = []
    for side, path, module in made.layers:
        attentions = tuple(part for name, part in module.named_children() if name == STOCK_ATTENTION)
        own = [held for name, held in made.experts.items() if name.startswith(f"{path}.")]
        mixture = Mixture(own[0].layer, own[0].module, own[0].parts) if own else None
        layers.append(Stage(path, side, module, attentions, mixture))
    return made.model, layers, (target for _, target in made.targets)


def _declared_parts(checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> Parts:
    model = building.assemble(checkpoint, device, dtype)
    mixtures = {}
    for layer in checkpoint.mixtures:
        parts = (
            ExpertPart(part, (f"{layer.expert_prefix}.{suffix}",), False)
            for part, suffix in EXPERT_PARTS.items()
        )
        module = model.get_submodule(module_name(model, layer.name))
        mixtures[layer.side, layer.layer] = Mixture(layer, module, tuple(parts))
    layers = []
    for stack in checkpoint.require_architecture().stacks:
        for number in range(checkpoint.layout.sizes.depth(stack)):
            name = stack.layers.format(layer=number)
            module = model.get_submodule(module_name(model, name))
            attentions = tuple(module.get_submodule(attention.name) for attention in stack.attentions)
            layers.append(Stage(name, stack.side, module, attentions, mixtures.get((stack.side, number))))
    experts = expert_names(checkpoint.mixtures)
    rest = [name for name in checkpoint.tensors if name not in experts]
    return model, layers, destinations(model, checkpoint, rest, dtype)
