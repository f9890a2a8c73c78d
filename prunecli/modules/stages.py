"""The layers and mixtures of a model without values, and where their tensors belong."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from prunecli.architectures.records import Side
from prunecli.errors import UnsupportedModelError
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.patchwork import submodule
from prunecli.model.sparse_layer import SparseLayer
from prunecli.modules.cpu_linear import dot_products
from prunecli.modules.filling import Block, Destination, Spec, block_bytes, missing_tensors, require_shape
from prunecli.modules.sparse_ffn import EXPERT_PARTS
from prunecli.modules.stock_experts import ExpertWeights, expert_modules, part_names, run_expert, shares_out
from prunecli.modules.stock_names import REMEDY, StockNames

ATTENTIONS = ("self_attn", "cross_attention")
"""The attentions of a layer with experts, in transformers' classes."""


@dataclass(frozen=True)
class Mixture:
    """The experts of a layer, which are read one at a time.

    Attributes:
        layer: as the checkpoint has it.
        module: a `SparseFFN` or a stock class's module of experts, on the meta device; its attribute `runner`, if not
            None, computes the experts' outputs `[assignments, d_model]` from their rows and `Dispatch`.
        parts: its stacked parameters, in the order of `ExpertWeights` -> names in the checkpoint whose rows, one after
            another, make up an expert's entry, "{expert}" for its number; or the one name that holds all experts.
    """

    layer: SparseLayer
    module: Any
    parts: Mapping[str, tuple[str, ...]]

    @property
    def stacked(self) -> list[Tensor]:
        """The stacked parameters that the module has now."""
        return [getattr(self.module, attribute) for attribute in self.parts]

    @property
    def dtype(self) -> torch.dtype:
        """Type of the experts' outputs, in which rows and outputs are stored."""
        return self.block(0)[0].dtype

    @property
    def names(self) -> set[str]:
        """Names in the checkpoint of the tensors of all experts."""
        return {
            source.format(expert=number)
            for sources in self.parts.values()
            for source in sources
            for number in range(self.layer.num_experts)
        }

    def block(self, expert: int) -> Block:
        """The tensors of one expert, as it is numbered in the checkpoint."""
        found = []
        for stacked, sources in zip(self.stacked, self.parts.values(), strict=True):
            names = tuple(name.format(expert=expert) for name in sources)
            entry = expert if names == sources else None
            found.append(Spec(names, tuple(stacked.shape[1:]), stacked.dtype, entry))
        return tuple(found)

    def run(
        self, rows: Tensor, tensors: Sequence[Tensor], watch: Callable[[Tensor], None] | None = None
    ) -> Tensor:
        """One expert on its rows `[rows, d_model]`, by the kernels of a whole layer; see `run_expert`.

        Args:
            tensors: of `block`.
        """
        with dot_products(rows.dtype, [len(rows)]):
            return run_expert(self.module, rows, ExpertWeights(*tensors), watch)

    def shares_out(self, counts: Sequence[int]) -> bool:
        """Whether a CPU would give each expert to one thread if experts have this number of rows each."""
        return shares_out(ExpertWeights(*self.stacked), counts)


@dataclass(frozen=True)
class Stage:
    """One layer of a model.

    Attributes:
        name: as in the checkpoint.
        side: of which stack.
        module: the layer.
        attentions: its attention modules, where it has experts.
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
        return tuple(target.spec for target in self.targets)


@dataclass(frozen=True)
class EmptyModel:
    """A model on the meta device, and where its tensors belong.

    Attributes:
        model: of the stock class, in evaluation mode.
        stages: its layers, in the order in which they run.
        resident: every other tensor that the checkpoint holds; the output layer's where that was asked for.
        device: where it is to run.
        implementation: what transformers would have its experts run by; "": nothing else does.
    """

    model: Any
    stages: tuple[Stage, ...]
    resident: tuple[Destination, ...]
    device: torch.device
    implementation: str

    @property
    def mixtures(self) -> tuple[Mixture, ...]:
        """The experts of all layers."""
        return tuple(stage.mixture for stage in self.stages if stage.mixture is not None)

    @property
    def targets(self) -> tuple[Destination, ...]:
        """Places in the model of all tensors but the experts'."""
        return (*self.resident, *(target for stage in self.stages for target in stage.targets))

    @property
    def resident_bytes(self) -> int:
        """Bytes that are held throughout where layers are read one after another."""
        return block_bytes(target.spec for target in self.resident)

    @property
    def widest_bytes(self) -> int:
        """Bytes of the largest layer without its experts, or of the largest expert."""
        blocks = (*(stage.block for stage in self.stages), *(mixture.block(0) for mixture in self.mixtures))
        return max(map(block_bytes, blocks))


def stock_mixtures(
    checkpoint: Checkpoint, names: StockNames, mixtures: Sequence[SparseLayer]
) -> list[Mixture]:
    """The experts of each mixture of a stock class."""
    modules = expert_modules(names.model)
    if [module.num_experts for module in modules.values()] != [layer.num_experts for layer in mixtures]:
        raise UnsupportedModelError(
            f"{checkpoint.path}: {type(names.model).__name__} has {len(modules)} layers of experts that can be run "
            f"from outside, the checkpoint holds {len(mixtures)}",
            REMEDY,
        )
    found = []
    for layer, (path, module) in zip(mixtures, modules.items(), strict=True):
        sources: dict[str, dict[int, str]] = {}
        for suffix in layer.expert_tensors:
            name = layer.expert_tensor(0, suffix)
            place = names.stacked(name)
            if place is None:
                raise names.refusal(name)
            sources.setdefault(place[0], {})[place[1]] = f"{layer.expert_prefix}.{suffix}"
        for name in layer.stacked_tensors:
            own = sources.setdefault(names.place(name), {})
            own[-1 - len(own)] = name
        parts = {}
        for attribute in part_names(module):
            target = f"{path}.{attribute}"
            if target not in sources:
                raise missing_tensors(checkpoint, [target])
            own = sources.pop(target)
            if -1 in own:
                require_shape(getattr(module, attribute), checkpoint, own[-1])
            parts[attribute] = tuple(own[place] for place in sorted(own))
        if sources:
            raise names.refusal(next(iter(sources)))
        found.append(Mixture(layer, module, parts))
    return found


def own_mixtures(model: Any, checkpoint: Checkpoint) -> list[Mixture]:
    """The experts of each `SparseFFN`."""
    return [
        Mixture(
            layer,
            submodule(model, layer.name),
            {part: (f"{layer.expert_prefix}.{suffix}",) for part, suffix in EXPERT_PARTS.items()},
        )
        for layer in checkpoint.mixtures
    ]


def stages_of(model: Any, checkpoint: Checkpoint, mixtures: Sequence[Mixture]) -> list[Stage]:
    """The layers of a model.

    Args:
        mixtures: its experts.
    """
    modules = [(layer, submodule(model, layer.name)) for layer in checkpoint.layout.layers]
    return [
        Stage(
            layer.name,
            layer.side,
            module,
            tuple(part for name, part in module.named_children() if name in ATTENTIONS),
            next((held for held in mixtures if held.module in within), None),
        )
        for layer, module in modules
        for within in [{*module.modules()}]
    ]
