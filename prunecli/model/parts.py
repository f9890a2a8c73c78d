"""The attentions and FFNs of a checkpoint: their heads and units, whose tensors each runs, and where these lie."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from prunecli.architectures.records import Attention, Carrier, FeedForward, Side, Stack, TensorSpec
from prunecli.errors import CheckpointError
from prunecli.model.axes import module_of
from prunecli.model.declared import REMEDY, Sizes, value_of
from prunecli.model.structure import Structure

AttentionKind = Literal["encoder", "decoder", "cross"]
CROSS = re.compile(r"cross|encoder_attn|enc_?dec", re.IGNORECASE)
"""In the names of attentions of a decoder to an encoder."""
MOST_HEADS = 100_000
"""A config.json that names more is damaged; a list of them would not fit in memory."""

KINDS: tuple[AttentionKind, ...] = get_args(AttentionKind)
KIND_NAMES = {
    "encoder": "encoder self-attention",
    "decoder": "decoder self-attention",
    "cross": "cross-attention",
}


class Owned:
    """Part of a layer that may run the tensors of another one of its kind: an attention or an FFN.

    Attributes:
        layer: number of its layer in the stack.
        owner: name of the part whose tensors it runs: its own, but where it is shared.
        stack: the record of its stack.
        spec: its record, with the tensors that its layer has.
        carriers: full names, in its own layer, of the tensors that grow with its units -> where the units lie.
        stated: number of heads or hidden units that config.json counts for it.
        removed: whether it is gone, together with its norms.
    """

    name: str
    layer: int
    owner: str
    removed: bool
    stated: int
    carriers: Mapping[str, Carrier]
    stack: Stack
    spec: Attention | FeedForward

    @property
    def prefix(self) -> str:
        """Beginning of the names of its tensors, which those in its record continue."""
        return self.name.removesuffix(self.spec.name)

    @property
    def stock_tensors(self) -> list[str]:
        """Full names of all tensors that its stock layer has for it, removed or not."""
        return [f"{self.prefix}{spec.name}" for spec in self.spec.tensors]

    @property
    def side(self) -> Side:
        """Side of its stack."""
        return self.stack.side

    @property
    def is_shared(self) -> bool:
        """Whether it runs the tensors of another one."""
        return self.owner != self.name

    @property
    def shared_with(self) -> str | None:
        """The other one whose tensors it runs; None: it runs its own."""
        return self.owner if self.is_shared else None

    @property
    def has_tensors(self) -> bool:
        """Whether tensors are stored under its own name."""
        return not (self.removed or self.is_shared)

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """Full names of all tensors that it would have of its own. A table that all layers use is none of them."""
        return tuple(f"{self.prefix}{spec.name}" for spec in self.spec.tensors if not spec.first)

    @property
    def shared_tensors(self) -> dict[str, str]:
        """Full names in its own layer -> those of the tensors that it runs; empty where it runs its own."""
        names = self.tensor_names if self.is_shared else ()
        return {name: self.owner + name.removeprefix(self.name) for name in names}

    @property
    def norm_tensors(self) -> tuple[str, ...]:
        """Full names of the tensors of its own norms, which are never shared."""
        layer, own = self.stack.layers.format(layer=self.layer), tuple(f"{norm}." for norm in self.spec.norms)
        return tuple(f"{layer}.{spec.name}" for spec in self.stack.norms if spec.name.startswith(own))


@dataclass(frozen=True)
class FfnLayer(Owned):
    """One FFN of the model, dense or sparse.

    Attributes:
        name: "model.encoder.layers.0.ffn"; that of the layer where the FFN's parts lie in the layer itself.
        own_name: the same, but with ".ffn" after the layer's name there, so that it cannot be taken for the layer.
        count: hidden units that it has (a sparse one: each of its experts); 0 where it is removed.
        is_sparse: whether it is a mixture of experts; its tensors are then those of `SparseLayer`.
        spec: without tensors where it is sparse.
    """

    name: str
    own_name: str
    layer: int
    count: int
    stated: int
    owner: str
    removed: bool
    is_sparse: bool
    carriers: Mapping[str, Carrier]
    stack: Stack
    spec: FeedForward

    @property
    def kind(self) -> Side:
        """Name of the FFN's kind: its side, as an attention has a kind."""
        return self.side

    @property
    def prefix(self) -> str:
        """See `Owned`."""
        return f"{self.name}."

    @property
    def output(self) -> str:
        """Name of the linear layer that gives the output: it holds the last tensor."""
        return module_of(self.tensor_names[-1])


def resolve_ffns(sizes: Sizes, structure: Structure) -> tuple[FfnLayer, ...]:
    """Every FFN, the encoder's first, by layer.

    Raises:
        CheckpointError: config.json lacks a size, or says what cannot be.
    """
    positions = {
        within(layer, stack.ffn): (stack, number)
        for stack in sizes.family.stacks
        for number, layer in sizes.layers(stack)
    }
    layers = []
    for name, (stack, number) in positions.items():
        owner = structure.shared.get(name, name)
        sparse = is_sparse(sizes, structure, stack, number)
        start = f"{stack.ffn.name}." if stack.ffn.name else ""
        specs = () if sparse else sizes.those_of(stack, structure, number, stack.ffn.tensors, start)
        sparse = not specs
        removed = name in structure.removed and not sparse
        width = _width(sizes, positions[owner][0].ffn)
        layers.append(
            FfnLayer(
                name=name,
                own_name=name if stack.ffn.name else f"{name}.ffn",
                layer=number,
                count=0 if removed else structure.widths.get(owner, width),
                stated=_width(sizes, stack.ffn),
                owner=owner,
                removed=removed,
                is_sparse=sparse,
                carriers=_carriers(name, () if removed else specs),
                stack=stack,
                spec=replace(stack.ffn, tensors=specs),
            )
        )
    return tuple(layers)


def _width(sizes: Sizes, ffn: FeedForward) -> int:
    return sizes.count(ffn.width) if ffn.width else 0


def within(layer: str, ffn: FeedForward) -> str:
    """Return the prefix of the names of an FFN's tensors, without the dot: the layer if the FFN is no module."""
    return f"{layer}.{ffn.name}" if ffn.name else layer


def is_sparse(sizes: Sizes, structure: Structure, stack: Stack, number: int) -> bool:
    """Whether the FFN of this layer, as the model counts them now, is a mixture of experts, by the config.

    Raises:
        CheckpointError: config.json says what cannot be.
    """
    if stack.ffn.sparse_step is None:
        return False
    step = sizes.count(stack.ffn.sparse_step)
    return step > 0 and (structure.original_layer(stack.side, number) + 1) % step == 0


def _carriers(owner: str, specs: Iterable[TensorSpec]) -> dict[str, Carrier]:
    """Full names of the tensors of `owner` that grow with heads or hidden units, and where these lie."""
    return {f"{owner}.{spec.name}": spec.units for spec in specs if spec.units is not None}


@dataclass(frozen=True)
class AttentionLayer(Owned):
    """One attention of the model. Where several query heads share a key/value head, a head here is all of these.

    Attributes:
        name: "model.encoder.layers.0.self_attn".
        kind: self-attention of the encoder or decoder, or cross-attention.
        heads: original ids of the heads that it holds, in the order in which they are stored; none where it is removed.
        original_heads: how many heads the original attention had.
        output: name of the linear layer whose input is the heads' outputs one after another.
        window: what it sees, in the words of config.json's `layer_types`; "" where all layers see the same.
    """

    name: str
    kind: AttentionKind
    layer: int
    heads: tuple[int, ...]
    stated: int
    original_heads: int
    carriers: Mapping[str, Carrier]
    output: str
    stack: Stack
    spec: Attention
    owner: str
    removed: bool = False
    window: str = ""

    @property
    def is_whole(self) -> bool:
        """Whether it holds every head that config.json counts, in order."""
        return self.heads == tuple(range(self.stated))

    @property
    def count(self) -> int:
        """Number of heads that it holds."""
        return len(self.heads)


def resolve_attentions(sizes: Sizes, structure: Structure) -> tuple[AttentionLayer, ...]:
    """Every attention: the encoder's, the decoder's, then cross-attention; by layer.

    Raises:
        CheckpointError: config.json holds no usable number of heads, or names heads that cannot be.
    """
    layers = [
        _layer(sizes, structure, stack, attention, number)
        for stack in sizes.family.stacks
        for number in range(sizes.depth(stack))
        for attention in stack.attentions
    ]
    # Of a class that was asked some layers may have no attention.
    layers = [layer for layer in layers if layer.spec.tensors]
    return tuple(sorted(layers, key=lambda layer: (KINDS.index(layer.kind), layer.layer)))


def _layer(
    sizes: Sizes, structure: Structure, stack: Stack, attention: Attention, number: int
) -> AttentionLayer:
    owner = stack.layers.format(layer=number)
    name = f"{owner}.{attention.name}"
    counted = sizes.count(attention.heads)
    if counted > MOST_HEADS:
        raise CheckpointError(f"config.json: {attention.heads} is {counted}; no model has so many heads")
    removed, holder = name in structure.removed, structure.shared.get(name, name)
    units = structure.units(holder, "head", counted)
    ids, original = () if removed else units.kept, units.of
    if len(set(ids)) != len(ids) or not all(0 <= head < original for head in ids):
        raise CheckpointError(
            f"config.json names heads {list(ids)} of {name}, which had {original}",
            REMEDY,
        )
    # Layers of one stack may differ.
    attention = replace(attention, tensors=sizes.those_of(stack, structure, number, attention.tensors))
    kind = "cross" if attention.kind == "cross" else stack.side
    output = f"{owner}.{attention.output}"
    return AttentionLayer(
        name=name,
        kind=kind,
        layer=number,
        heads=ids,
        stated=counted,
        original_heads=original,
        carriers=_carriers(owner, attention.tensors),
        output=output,
        stack=stack,
        spec=attention,
        owner=holder,
        removed=removed,
        window=windows[number] if (windows := layer_windows(sizes, stack)) else "",
    )


def layer_windows(sizes: Sizes, stack: Stack) -> list[str]:
    """Return the attention type of each layer as in `layer_types` of config.json; empty if all are alike."""
    key = f"{stack.depth.rpartition('.')[0]}.layer_types".removeprefix(".")
    types = value_of(sizes.config, key)
    if types is None and sizes.family.found is not None:
        types = value_of(sizes.family.found.skeleton.effective, key)
    return (
        [str(name) for name in types] if isinstance(types, list) and len(types) == sizes.depth(stack) else []
    )


def kind_and_layer(attention: str) -> tuple[str, int]:
    """Kind and layer of an attention by its name; ("heads", 0) where the name does not say them."""
    number = re.search(r"\.(\d{1,6})\.", attention)
    kinds = [kind for kind in ("encoder", "decoder") if re.search(rf"\b{kind}\b", attention)]
    if number is None or not kinds:
        return "heads", 0
    return "cross" if CROSS.search(attention[number.end() :]) else kinds[0], int(number[1])


def check_parts(sizes: Sizes, structure: Structure) -> None:
    """Refuse a structure that shares, removes or resizes what it cannot.

    Raises:
        CheckpointError: an attention or FFN that the model lacks, or cannot do without; one that is shared with
            another kind, or with one that has no tensors of its own; a change of a mixture of experts.
    """
    mixture, ffn, found = ("mixture",), ("FFN",), sizes.family.found
    kinds: dict[str, tuple[str, ...]] = {}  # name of each -> equal for those that may share
    for stack in sizes.family.stacks:
        for number, layer in sizes.layers(stack):
            kinds[within(layer, stack.ffn)] = mixture if is_sparse(sizes, structure, stack, number) else ffn
            for record in stack.attentions:
                names = [spec.name for spec in record.tensors]
                # Where each layer has one module, an attention and an FFN may have the same name.
                if found is None or any(found.holds(stack, structure, number, name) for name in names):
                    kinds[f"{layer}.{record.name}"] = stack.side, record.name
    shared, removed, widths = structure.shared, structure.removed, structure.widths
    for name in (*shared, *shared.values(), *sorted(removed), *widths):
        if name not in kinds or (name in widths and kinds[name] not in (mixture, ffn)):
            what = "FFN" if name in widths else "FFN or attention"
            raise CheckpointError(f"config.json names {name}, which is no {what} of the model", REMEDY)
        if kinds[name] == mixture:
            reason = "a mixture of experts can be neither shared nor removed nor of another width"
            raise CheckpointError(f"config.json changes {name}: {reason}", REMEDY)
    for name, owner in shared.items():
        faults = {
            "of another kind": kinds[name] != kinds[owner],
            "removed": owner in removed,
            "shared": owner in shared,
        }
        if fault := next((fault for fault, holds in faults.items() if holds), None):
            raise CheckpointError(f"config.json: {name} shares with {owner}, which is {fault}", REMEDY)
    for stack in sizes.family.stacks:
        for record in stack.attentions:
            own = [name for name, kind in kinds.items() if kind == (stack.side, record.name)]
            has_table = any(spec.first for spec in record.tensors)
            if has_table and own and own[0] in removed and not removed.issuperset(own):
                raise CheckpointError(
                    f"config.json: {own[0]} is removed, whose table of positions other layers use", REMEDY
                )


def describe_parts(parts: Sequence[AttentionLayer] | Sequence[FfnLayer], widths: Mapping[str, int]) -> str:
    """How they differ from the stock ones, in a line: "encoder 1-5 share layer 0's; decoder 0-5 removed"; "": nohow.

    Args:
        parts: every attention, or every FFN, of the model.
        widths: `Structure.widths`.
    """
    by_name = {part.name: part for part in parts}
    numbers_by_change: dict[tuple[str, str], list[int]] = {}
    for part in parts:
        if part.removed:
            what = "removed"
        elif part.is_shared:
            owner = by_name[part.owner]
            what = f"share {'layer' if owner.kind == part.kind else owner.kind} {owner.layer}'s"
        elif part.name in widths:
            what = f"of width {widths[part.name]:,}"
        else:
            continue
        numbers_by_change.setdefault((part.kind, what), []).append(part.layer)
    return "; ".join(
        f"{where} {ranges(numbers)} {what if len(numbers) > 1 else what.replace('share ', 'shares ')}"
        for (where, what), numbers in numbers_by_change.items()
    )


def ranges(ascending: Sequence[int]) -> str:
    """ "0-3, 5" """
    ends_of_runs: list[list[int]] = []
    for number in ascending:
        if ends_of_runs and number == ends_of_runs[-1][-1] + 1:
            ends_of_runs[-1][1:] = [number]
        else:
            ends_of_runs.append([number])
    return ", ".join("-".join(map(str, ends)) for ends in ends_of_runs)
