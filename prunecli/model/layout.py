"""What a model is: family, config.json and structure, resolved once into its layers, tensors and ties."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any, Literal

from prunecli.architectures import Architecture
from prunecli.architectures.records import Part, Side, Stack, TensorSpec
from prunecli.errors import UnsupportedModelError
from prunecli.model.attention import AttentionLayer, resolve_attentions
from prunecli.model.axes import axis_name
from prunecli.model.declared import Sizes
from prunecli.model.depth import check_layers, config_of_layers
from prunecli.model.embedding import TokenTables, resolve_tables, resolve_ties
from prunecli.model.ffn import FfnLayer, own_norms, resolve_ffns, within
from prunecli.model.mixtures import stated_counts
from prunecli.model.parts import check_parts
from prunecli.model.structure import Structure

Declared = tuple[tuple[int, ...], Part]
"""A tensor's shape, and what it is counted under."""


@dataclass(frozen=True)
class Layer:
    """One layer of a stack.

    Attributes:
        side: of which stack.
        number: in the stack.
        name: "model.encoder.layers.0".
        attentions: self-attention, and in a decoder of two stacks cross-attention.
        ffn: dense, sparse, shared or removed.
    """

    side: Side
    number: int
    name: str
    attentions: tuple[AttentionLayer, ...]
    ffn: FfnLayer


@dataclass(frozen=True)
class ModelLayout:
    """A model of a declared family. Resolved by `resolve`; nothing is worked out again from its parts.

    Attributes:
        sizes: the family's record with the values of config.json.
        structure: how it differs from the stock model.
        attentions: the encoder's, the decoder's, then cross-attention; by layer.
        ffns: the encoder's first, by layer.
        tables: token embeddings; None where the family does not declare them.
        ties: alias -> stored name of the tensors that are one.
    """

    sizes: Sizes
    structure: Structure
    attentions: tuple[AttentionLayer, ...]
    ffns: tuple[FfnLayer, ...]
    tables: TokenTables | None
    ties: Mapping[str, str]

    @cached_property
    def tensors(self) -> Mapping[str, Declared]:
        """Name -> shape and part of every tensor that it stores, tied ones once.

        Raises:
            CheckpointError: config.json lacks a size, or holds one that is no count.
        """
        return _expected(self) if self.family.found is None else _found(self)

    @property
    def family(self) -> Architecture:
        """The declared family."""
        return self.sizes.family

    @property
    def config(self) -> Mapping[str, Any]:
        """config.json."""
        return self.sizes.config

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Name -> shape of every tensor that it stores."""
        return {name: shape for name, (shape, _) in self.tensors.items()}

    @cached_property
    def own_attentions(self) -> tuple[AttentionLayer, ...]:
        """The attentions that hold tensors, and heads, of their own: neither shared nor removed."""
        return tuple(layer for layer in self.attentions if layer.has_tensors)

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """Every layer, the encoder's first."""
        attentions: dict[tuple[Side, int], list[AttentionLayer]] = {}
        for one in self.attentions:
            attentions.setdefault((one.stack.side, one.layer), []).append(one)
        names = {
            (stack.side, number): name
            for stack in self.family.stacks
            for number, name in self.sizes.layers(stack)
        }
        return tuple(
            Layer(ffn.side, ffn.layer, names[position], tuple(attentions.get(position, ())), ffn)
            for ffn in self.ffns
            for position in [(ffn.side, ffn.layer)]
        )

    def require_heads(self) -> tuple[AttentionLayer, ...]:
        """`own_attentions`.

        Raises:
            UnsupportedModelError: no attention has heads that can be removed.
        """
        if not self.own_attentions:
            raise UnsupportedModelError(
                f"models of type {self.family.model_type} have no heads that can be removed: they have no attention, "
                "or one that computes something else without some of its heads, such as a norm over all of them"
            )
        return self.own_attentions

    def changed(
        self, structure: Structure | None = None, config: Mapping[str, Any] | None = None
    ) -> ModelLayout:
        """Return the layout of another structure, another config.json or both; None: this model's.

        Without a `config`, this model's says how many layers there are by `structure`.

        Raises:
            CheckpointError: as `resolve`.
        """
        structure = self.structure if structure is None else structure
        if config is None:
            config = config_of_layers(self.sizes, self.structure, structure)
        return resolve(self.family, config, structure)

    def require_tables(self) -> TokenTables:
        """The token embeddings.

        Raises:
            UnsupportedModelError: the family does not declare them.
        """
        if self.tables is None:
            raise UnsupportedModelError(
                f"where models of type {self.family.model_type} keep their embeddings is not declared"
            )
        return self.tables

    def part(self, name: str) -> Part | Literal["other"]:
        """Return the part that a tensor is counted under, or "other" if the family does not declare the tensor."""
        # An alias that is kept because its values differ counts as what it should equal.
        declared = self.tensors.get(name) or self.tensors.get(self.family.tied.get(name, ""))
        return declared[1] if declared else "other"

    def is_extra(self, name: str) -> bool:
        """Whether a tensor belongs to a part that only some classes of the family have, and that no method changes."""
        return self.family.found is not None or name.startswith(self.family.extras)

    def faults(self, tensors: Mapping[str, tuple[int, ...]]) -> str:
        """How these tensors, name -> shape, are not those that it stores; "": they are."""
        missing = [name for name in self.shapes if name not in tensors]
        unexpected = [name for name in tensors if name not in self.shapes and not self.is_extra(name)]
        misshapen = [
            f"{name} {list(tensors[name])} instead of {list(shape)}"
            for name, shape in self.shapes.items()
            if name in tensors and tensors[name] != shape
        ]
        return "; ".join(
            f"{len(names)} {kind} ({', '.join(names[:3])}{', …' if len(names) > 3 else ''})"
            for kind, names in (("missing", missing), ("unexpected", unexpected), ("misshapen", misshapen))
            if names
        )


def resolve(family: Architecture, config: Mapping[str, Any], structure: Structure) -> ModelLayout:
    """The model that `config` and `structure` describe.

    Raises:
        CheckpointError: config.json lacks a size, or it or the structure says what cannot be.
    """
    sizes = Sizes(family, config)
    if family.stacks:  # else its experts alone are known
        check_layers(sizes, structure)
        check_parts(sizes, structure)
    tables = resolve_tables(sizes, structure) if family.stacks else None
    return ModelLayout(
        sizes,
        structure,
        resolve_attentions(sizes, structure),
        resolve_ffns(sizes, structure),
        tables,
        resolve_ties(sizes, tables),
    )


def _found(layout: ModelLayout) -> dict[str, Declared]:
    """The tensors of a class that was asked, with the widths and heads that each layer has now."""
    parts: dict[str, Part] = {name: "ffn" for ffn in layout.ffns for name in ffn.tensor_names}
    parts |= {name: "attention" for layer in layout.attentions for name in layer.tensors}
    shapes = {name: [*shape] for name, shape in layout.family.found.stored(layout.config).items()}
    gone = {*layout.ties}
    if (tables := layout.tables) is not None:
        if tables.unit is not None:
            gone.update(f"{name}.weight" for name in (tables.input, *tables.aliases))
        shapes |= {name: [*shape] for name, shape in tables.tensors.items()}
        parts |= dict.fromkeys(tables.tensors, "embeddings")
    for layer in layout.attentions:
        gone.update(layer.shared_tensors)
        if layer.removed:
            gone.update(layer.tensor_names, layer.norm_tensors)
            continue
        for name, carrier in () if layer.is_shared else layer.tensors.items():
            shapes[name][carrier.dim] = shapes[name][carrier.dim] * layer.num_heads // layer.stated_heads
            if not layer.num_heads:
                gone.add(name)
    for ffn in layout.ffns:
        if ffn.removed:
            gone.update(ffn.norm_tensors, (f"{ffn.name}.{spec.name}" for spec in ffn.stack.ffn.tensors))
        elif ffn.is_shared:
            gone.update(f"{ffn.name}.{suffix}" for suffix in ffn.tensors)
        for suffix, dim in () if ffn.is_shared else ffn.tensors.items():
            if dim is not None:
                shapes[f"{ffn.prefix}{suffix}"][dim] = ffn.width * ffn.blocks[suffix]
    return {
        name: (tuple(shape), parts.get(name, "embeddings"))
        for name, shape in shapes.items()
        if name not in gone
    }


def _expected(layout: ModelLayout) -> dict[str, Declared]:
    sizes, structure, tables = layout.sizes, layout.structure, layout.tables
    tensors: dict[str, Declared] = {}

    def add(
        owner: str,
        specs: tuple[TensorSpec, ...],
        *,
        experts: int = 0,
        part: Part | None = None,
        heads: Fraction = Fraction(1),
        width: int | None = None,
        first: bool = True,
    ) -> None:
        for spec in specs:
            if (spec.first and not first) or not sizes.holds(spec.optional):
                continue
            shape = [experts if key == "expert_count" else sizes.count(key) for key in spec.shape]
            if spec.heads is not None:
                if heads == 0:  # a tensor of no head at all is not stored
                    continue
                shape[spec.heads.axis] = int(shape[spec.heads.axis] * heads)
            if spec.hidden is not None and width is not None:
                shape[spec.hidden] = width * spec.hidden_blocks
            tensors[f"{owner}{spec.name}"] = tuple(shape), part or spec.part

    def add_ffn(stack: Stack, ffn: FfnLayer) -> None:
        if ffn.removed or ffn.is_shared:
            return
        if not ffn.is_sparse:
            add(ffn.prefix, stack.ffn.tensors, width=ffn.width)
            return
        experts, mixture = expert_count(sizes, structure, ffn.name), sizes.family.mixture
        assert mixture is not None
        assert mixture.expert is not None
        add(ffn.prefix, stack.ffn.router, experts=experts)
        prefixes = [f"{ffn.prefix}{mixture.expert.format(expert=expert)}." for expert in range(experts)]
        if not prefixes:
            return
        add(prefixes[0], stack.ffn.tensors, part="experts")
        names = [spec.name for spec in stack.ffn.tensors]
        first = [(name, tensors[prefixes[0] + name]) for name in names if prefixes[0] + name in tensors]
        for prefix in prefixes[1:]:  # there may be tens of thousands, all alike
            tensors.update((prefix + name, declared) for name, declared in first)

    add("", sizes.family.tensors)
    if tables is not None:
        for name in tables.stock:
            del tensors[name]
        tensors |= {name: (shape, "embeddings") for name, shape in tables.tensors.items()}
    own = {ffn.name: ffn for ffn in layout.ffns}
    attentions = {layer.name: layer for layer in layout.attentions}
    for stack in sizes.family.stacks:
        for number, layer in sizes.layers(stack):
            ffn = own[within(layer, stack.ffn)]
            gone = set(own_norms(stack, stack.ffn) if ffn.removed else ())
            for attention in stack.attentions:
                resolved = attentions[f"{layer}.{attention.name}"]
                if resolved.removed:
                    gone.update(own_norms(stack, attention))
                    continue
                stored = tuple(spec for spec in attention.tensors if spec.first or not resolved.is_shared)
                share = Fraction(resolved.num_heads, max(resolved.stated_heads, 1))
                add(f"{layer}.", stored, heads=share, first=number == 0)
            add(f"{layer}.", tuple(spec for spec in stack.norms if spec.name not in gone))
            add_ffn(stack, ffn)
    return tensors


def expert_count(sizes: Sizes, structure: Structure, layer: str) -> int:
    """How many experts a mixture holds."""
    axis = axis_name(layer, "expert")
    if axis in structure.axes:
        return len(structure.axes[axis].kept)
    mixture = sizes.family.mixture
    assert mixture is not None
    stated = stated_counts(sizes, mixture)
    return next(iter(stated.values()), sizes.count(mixture.counts[0]))
