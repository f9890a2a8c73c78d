"""What `inspect` counts, without weights: parameters and bytes by part, layers, experts, types.

`inspect --json` prints these values as they are, and pydantic checks them when they are read.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from prunecli.architectures.records import Side
from prunecli.errors import CheckpointError
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.decision import Count
from prunecli.model.embedding import TokenTables
from prunecli.model.layout import ModelLayout
from prunecli.model.names import by_module
from prunecli.model.parts import AttentionLayer, FfnLayer
from prunecli.model.quantised import QuantisedWeight, method_of, owners_of
from prunecli.model.sparse_layer import SparseLayer, parts_of

PARTS = ("embeddings", "attention", "ffn", "experts", "router", "norm", "other")


@dataclass(frozen=True)
class Amount:
    """Tensors, their parameters (elements) and bytes."""

    tensors: Count = 0
    parameters: Count = 0
    bytes: Count = 0

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
    layers: tuple[Count, ...]
    original_layers: Count


@dataclass(frozen=True)
class Quantisation:
    """How a checkpoint is quantised.

    Attributes:
        method: that config.json names ("awq"); "" where it names none.
        schemes: how weights are stored, "scaled, 8 bits, blocks of 128 x 128" -> how many are, the most first.
        weights: how many are quantised, stacked ones as often as they have matrices.
        parameters: that these stand for.
        bits_per_parameter: stored bits over parameters, of the whole checkpoint.
    """

    method: str = ""
    schemes: Mapping[str, Count] = field(default_factory=dict)
    weights: Count = 0
    parameters: Count = 0
    bits_per_parameter: float = 0.0


@dataclass(frozen=True)
class Inventory:
    """Contents of a checkpoint.

    Attributes:
        parts: part -> amount, in the order of `PARTS`, those that occur.
        dtypes: safetensors type -> amount, the largest first.
        stacks: the layers of each; none where its class says nothing.
        layers: the sparse layers, encoder first; none where there are no experts.
        attentions: every attention; none where its class says nothing.
        ffns: every FFN; none where its class says nothing.
        tables: the token embeddings; None where the family does not declare them.
        total: of all tensors.
        modules: the tensors of part "other", by module.
        quantisation: how it is quantised; None: it is not.
    """

    parts: Mapping[str, Amount]
    dtypes: Mapping[str, Amount]
    stacks: tuple[StackLayers, ...]
    layers: tuple[SparseLayer, ...]
    attentions: tuple[AttentionLayer, ...]
    ffns: tuple[FfnLayer, ...]
    tables: TokenTables | None
    total: Amount
    modules: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    quantisation: Quantisation | None = None


def take_inventory(checkpoint: Checkpoint) -> Inventory:
    """Count what the checkpoint holds.

    Raises:
        CheckpointError: a sparse layer lacks an expert or its router, or config.json names heads or FFNs that cannot
            be.
    """
    by_part: dict[str, Amount] = {}
    by_dtype: dict[str, Amount] = {}
    mixtures = () if checkpoint.family is None else checkpoint.mixtures
    layout = _layout(checkpoint)
    of_mixtures = dict(parts_of(mixtures)) if checkpoint.runs_stock else {}
    owners, counted, unknown = owners_of(checkpoint.quantised.values()), set[str](), list[str]()
    for name, info in checkpoint.tensors.items():
        weight = owners.get(name)
        logical = name if weight is None else weight.name
        # A quantised weight has as many parameters as it stands for, and its scales have none.
        values = None if logical in counted else checkpoint.unquantised.get(logical)
        counted.add(logical)
        amount = Amount(1, 0 if values is None else values.numel, info.nbytes)
        part = of_mixtures.get(name) or ("other" if layout is None else layout.part(logical))
        if part == "other":
            unknown.append(name)
        by_part[part] = by_part.get(part, Amount()) + amount
        by_dtype[info.dtype] = by_dtype.get(info.dtype, Amount()) + amount
    total = sum(by_part.values(), Amount())
    return Inventory(
        parts={part: by_part[part] for part in PARTS if part in by_part},
        dtypes=dict(sorted(by_dtype.items(), key=lambda item: (-item[1].bytes, item[0]))),
        stacks=()
        if layout is None
        else tuple(
            StackLayers(stack.side, units.kept, units.of)
            for stack in layout.family.stacks
            for units in [layout.structure.units(stack.side, "layer", layout.sizes.depth(stack))]
        ),
        layers=mixtures,
        attentions=() if layout is None else layout.attentions,
        ffns=() if layout is None else layout.ffns,
        tables=None if layout is None else layout.tables,
        total=total,
        modules=by_module(unknown),
        quantisation=_quantisation(checkpoint, total),
    )


def _layout(checkpoint: Checkpoint) -> ModelLayout | None:
    """Its layout; None if the class of a family that is not declared says nothing."""
    with suppress(CheckpointError):
        return checkpoint.layout
    return None


def _quantisation(checkpoint: Checkpoint, total: Amount) -> Quantisation | None:
    method = method_of(checkpoint.config)
    if not method and not checkpoint.quantised:
        return None
    schemes, weights, parameters = Counter[str](), 0, 0
    for weight in checkpoint.quantised.values():
        shape = checkpoint.unquantised[weight.name].shape
        matrices = math.prod(shape[:-2])
        weights, parameters = weights + matrices, parameters + math.prod(shape)
        schemes[_scheme(weight)] += matrices
    bits = 8 * total.bytes / max(1, total.parameters)
    return Quantisation(method, dict(schemes.most_common()), weights, parameters, bits)


def _scheme(weight: QuantisedWeight) -> str:
    rows, columns = weight.block
    shape = weight.shape or ()
    if weight.scheme == "bitsandbytes":
        shared = ""
    elif (rows, columns) == tuple(shape[-2:]):
        shared = ", one scale each"
    elif rows > 1:
        shared = f", blocks of {rows} x {columns}"
    else:
        shared = ", a scale for each row" if columns == shape[-1] else f", groups of {columns}"
    return f"{weight.scheme}, {weight.bits} bits{shared}"
