"""What `inspect` counts, from headers alone: parameters and bytes by part, layers, experts, types."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from prunecli.architectures.records import Side
from prunecli.model.attention import AttentionLayer
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.embedding import TokenTables
from prunecli.model.ffn import FfnLayer
from prunecli.model.layout import ModelLayout
from prunecli.model.mixtures import SparseLayer, parts_of
from prunecli.model.names import Surmise, surmise
from prunecli.model.quantised import owners_of

PARTS = ("embeddings", "attention", "ffn", "experts", "router", "norm", "other")


@dataclass(frozen=True)
class Amount:
    """Tensors, their parameters (elements) and bytes."""

    tensors: int = 0
    parameters: int = 0
    bytes: int = 0

    def __add__(self, other: Amount) -> Amount:
        return Amount(
            self.tensors + other.tensors, self.parameters + other.parameters, self.bytes + other.bytes
        )


@dataclass(frozen=True)
class StackLayers:
    """The layers of one stack.

    Attributes:
        side: of which stack.
        layers: original numbers of those that it holds, ascending.
        original_layers: how many the original stack had.
    """

    side: Side
    layers: tuple[int, ...]
    original_layers: int


@dataclass(frozen=True)
class Inventory:
    """What a checkpoint holds.

    Attributes:
        parts: part -> amount, in the order of `PARTS`, those that occur.
        dtypes: safetensors type -> amount, the largest first.
        stacks: the layers of each; none where the family is not declared.
        layers: the sparse layers, encoder first; none where the family is not declared or has no experts.
        attentions: every attention; none where the family is not declared.
        ffns: every FFN; none where the family is not declared.
        tables: the token embeddings; None where the family does not declare them.
        total: of all tensors.
        surmise: what the names of tensors suggest, where the family is not declared.
    """

    parts: Mapping[str, Amount]
    dtypes: Mapping[str, Amount]
    stacks: tuple[StackLayers, ...]
    layers: tuple[SparseLayer, ...]
    attentions: tuple[AttentionLayer, ...]
    ffns: tuple[FfnLayer, ...]
    tables: TokenTables | None
    total: Amount
    surmise: Surmise | None = None


def take_inventory(checkpoint: Checkpoint) -> Inventory:
    """Count what the checkpoint holds.

    Raises:
        CheckpointError: a sparse layer lacks an expert or its router, or config.json names heads or FFNs that cannot
            be.
    """
    by_part: dict[str, Amount] = {}
    by_dtype: dict[str, Amount] = {}
    layout = None if checkpoint.architecture is None else checkpoint.layout
    mixtures = () if checkpoint.family is None else checkpoint.mixtures
    of_mixtures = dict(parts_of(mixtures)) if layout is None else {}
    owners, counted = owners_of(checkpoint.quantised.values()), set[str]()
    for name, info in checkpoint.tensors.items():
        weight = owners.get(name)
        logical = name if weight is None else weight.name
        # A quantised weight has as many parameters as it stands for, and its scales have none.
        values = None if logical in counted else checkpoint.unquantised.get(logical)
        counted.add(logical)
        amount = Amount(1, 0 if values is None else values.numel, info.nbytes)
        part = of_mixtures.get(name, "other") if layout is None else layout.part(logical)
        by_part[part] = by_part.get(part, Amount()) + amount
        by_dtype[info.dtype] = by_dtype.get(info.dtype, Amount()) + amount
    return Inventory(
        parts={part: by_part[part] for part in PARTS if part in by_part},
        dtypes=dict(sorted(by_dtype.items(), key=lambda item: (-item[1].bytes, item[0]))),
        stacks=() if layout is None else _stacks(layout),
        layers=mixtures,
        attentions=() if layout is None else layout.attentions,
        ffns=() if layout is None else layout.ffns,
        tables=_tables(checkpoint),
        total=sum(by_part.values(), Amount()),
        surmise=None if checkpoint.architecture else surmise(checkpoint.config, checkpoint.tensors),
    )


def _stacks(layout: ModelLayout) -> tuple[StackLayers, ...]:
    structure, depths = layout.structure, {s.side: layout.sizes.depth(s) for s in layout.family.stacks}
    return tuple(
        StackLayers(
            side,
            structure.layers.get(side, tuple(range(depth))),
            structure.original_layers.get(side, depth),
        )
        for side, depth in depths.items()
    )


def _tables(checkpoint: Checkpoint) -> TokenTables | None:
    if checkpoint.architecture is None or checkpoint.architecture.embedding is None:
        return None
    return checkpoint.layout.require_tables()
