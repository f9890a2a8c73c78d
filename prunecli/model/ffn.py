"""The FFNs of a checkpoint: whose tensors each runs, how wide it is, and where its hidden units lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from prunecli.architectures.records import Attention, FeedForward, Side, Stack
from prunecli.errors import CheckpointError
from prunecli.model.changes import FfnChange
from prunecli.model.declared import Sizes
from prunecli.model.structure import Structure

REMEDY = "config.json and the weights are not of one checkpoint; copy both again."


@dataclass(frozen=True)
class FfnLayer:
    """One FFN of the model, dense or sparse.

    Attributes:
        name: "model.encoder.layers.0.ffn"; that of the layer where the FFN's parts lie in the layer itself.
        own_name: the same, but with ".ffn" after the layer's name there, so that it cannot be taken for the layer.
        side: of which stack.
        layer: its number in the stack.
        width: hidden units that it has (a sparse one: each of its experts); 0 where it is removed.
        owner: name of the FFN whose tensors it runs: its own, but where it is shared.
        removed: whether it is gone, together with its norm.
        is_sparse: whether it is a mixture of experts; its tensors are then those of `layout.SparseLayer`.
        tensors: of a dense FFN, relative to it -> the axis on which the hidden units lie, or None: the output's bias
            has none. Empty where it is removed or sparse.
        blocks: of these, how often all hidden units occur on that axis: 2 where gate and up are fused.
        norm_tensors: full names of those of its own norms, which are never shared; none where it is removed.
    """

    name: str
    own_name: str
    side: Side
    layer: int
    width: int
    owner: str
    removed: bool
    is_sparse: bool
    tensors: Mapping[str, int | None]
    blocks: Mapping[str, int]
    norm_tensors: tuple[str, ...]
    stack: Stack = field(repr=False)

    @property
    def prefix(self) -> str:
        """What the full names of the tensors that it runs begin with: the owner's name and a dot."""
        return f"{self.owner}."

    @property
    def is_shared(self) -> bool:
        """Whether it runs the tensors of another one."""
        return self.owner != self.name

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """Full names of the tensors that it runs, in the order of `tensors`."""
        return tuple(f"{self.prefix}{suffix}" for suffix in self.tensors)


def resolve_ffns(sizes: Sizes, structure: Structure) -> tuple[FfnLayer, ...]:
    """Every FFN, the encoder's first, by layer.

    Raises:
        CheckpointError: config.json lacks a size, or its structure names an FFN that the model lacks, or shares with
            one that has no tensors of its own, or changes a mixture of experts.
    """
    positions = {
        within(layer, stack.ffn): (stack, number)
        for stack in sizes.family.stacks
        for number, layer in sizes.layers(stack)
    }
    _check(sizes, structure, positions)

    def width(name: str) -> int:
        stated = structure.ffn.get(name, FfnChange()).width
        if stated is not None:
            return stated
        stack, number = positions[name]
        own = stack.ffn.expert_width if is_sparse(sizes, structure, stack, number) else None
        return sizes.count(own or stack.ffn.width)

    layers = []
    for name, (stack, number) in positions.items():
        change = structure.ffn.get(name, FfnChange())
        owner = change.shared_with or name
        sparse = is_sparse(sizes, structure, stack, number)
        specs = () if change.removed or sparse else stack.ffn.tensors
        specs = tuple(spec for spec in specs if sizes.holds(spec.optional))
        norms = () if change.removed else own_norms(stack, stack.ffn)
        layers.append(
            FfnLayer(
                name=name,
                own_name=name if stack.ffn.name else f"{name}.ffn",
                side=stack.side,
                layer=number,
                width=0 if change.removed else width(owner),
                owner=owner,
                removed=change.removed,
                is_sparse=sparse,
                tensors={spec.name: spec.hidden for spec in specs},
                blocks={spec.name: spec.hidden_blocks for spec in specs},
                norm_tensors=tuple(f"{stack.layers.format(layer=number)}.{norm}" for norm in norms),
                stack=stack,
            )
        )
    return tuple(layers)


def describe_ffns(layers: Sequence[FfnLayer], changes: Mapping[str, FfnChange]) -> str:
    """What `changes` say, in a line: "encoder 1-5 share layer 0's; decoder 0-5 removed"; "" where they say nothing.

    Args:
        layers: every FFN of the model.
        changes: `Structure.ffn`.
    """
    by_name = {layer.name: layer for layer in layers}
    numbers_by_change: dict[tuple[str, str], list[int]] = {}
    for layer in layers:
        change = changes.get(layer.name, FfnChange())
        what = ""
        if change.removed:
            what = "removed"
        elif change.shared_with is not None:
            owner = by_name[change.shared_with]
            where = "layer" if owner.side == layer.side else owner.side
            what = f"share {where} {owner.layer}'s"
        elif change.width is not None:
            what = f"of width {change.width:,}"
        if what:
            numbers_by_change.setdefault((layer.side, what), []).append(layer.layer)
    return changes_text(numbers_by_change)


def changes_text(numbers_by_change: Mapping[tuple[str, str], Sequence[int]]) -> str:
    """(Stack or kind, what changed) -> numbers of its layers, as a line."""
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


def within(layer: str, ffn: FeedForward) -> str:
    """What the names of an FFN's tensors begin with, up to a dot: the layer itself where the FFN is no module."""
    return f"{layer}.{ffn.name}" if ffn.name else layer


def is_sparse(sizes: Sizes, structure: Structure, stack: Stack, number: int) -> bool:
    """Whether the FFN of this layer, as the model counts them now, is a mixture of experts, by the config.

    Raises:
        CheckpointError: config.json says what cannot be.
    """
    ffn = stack.ffn
    if ffn.sparse_step is None:
        return False
    if ffn.dense_layers is None:
        number = structure.original_layer(stack.side, number)
    else:
        listed = sizes.config.get(ffn.dense_layers, [])
        if listed is not None and (
            not isinstance(listed, list) or any(type(layer) is not int for layer in listed)
        ):
            raise CheckpointError(f'config.json: "{ffn.dense_layers}" is {listed!r}, not a list of layers')
        if number in (listed or ()):
            return False
    step = sizes.count(ffn.sparse_step)
    return step > 0 and (number + 1) % step == 0


def own_norms(stack: Stack, part: FeedForward | Attention) -> tuple[str, ...]:
    """The tensors of the own norms of an FFN or attention of the stack, relative to the layer."""
    own = tuple(f"{norm}." for norm in part.norms)
    return tuple(spec.name for spec in stack.norms if spec.name.startswith(own))


def _check(sizes: Sizes, structure: Structure, positions: Mapping[str, tuple[Stack, int]]) -> None:
    for name, change in structure.ffn.items():
        owner = change.shared_with
        for named in (name,) if owner is None else (name, owner):
            if named not in positions:
                raise CheckpointError(f"config.json names {named}, which is no FFN of the model", REMEDY)
            stack, number = positions[named]
            if is_sparse(sizes, structure, stack, number):
                reason = "a mixture of experts can be neither shared nor removed nor of another width"
                raise CheckpointError(f"config.json changes {named}: {reason}", REMEDY)
        if owner is None:
            continue
        target = structure.ffn.get(owner, FfnChange())
        if owner == name or target.removed or target.shared_with is not None:
            state = (
                "itself"
                if owner == name
                else f"{owner}, which is {'removed' if target.removed else 'shared'}"
            )
            raise CheckpointError(f"config.json: {name} shares its FFN with {state}", REMEDY)
