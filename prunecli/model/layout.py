"""What a model is: family, config.json and structure, resolved once into its layers, tensors and ties."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from prunecli.architectures import Architecture
from prunecli.architectures.records import Part, Side, TensorSpec
from prunecli.errors import UnsupportedModelError
from prunecli.model.axes import axis_name, module_of
from prunecli.model.declared import Sizes
from prunecli.model.depth import check_layers, config_of_layers
from prunecli.model.embedding import TokenTables, resolve_tables, resolve_ties
from prunecli.model.mixtures import stated_counts
from prunecli.model.names import layer_of
from prunecli.model.parts import AttentionLayer, FfnLayer, check_parts, resolve_attentions, resolve_ffns
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
        return _changed(self, _recorded(self) if self.family.found is None else _found(self))

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
            attentions.setdefault((one.side, one.layer), []).append(one)
        return tuple(
            Layer(
                ffn.side,
                ffn.layer,
                ffn.stack.layers.format(layer=ffn.layer),
                tuple(attentions.get((ffn.side, ffn.layer), ())),
                ffn,
            )
            for ffn in self.ffns
        )

    def require_heads(self) -> tuple[AttentionLayer, ...]:
        """Attentions with tensors of their own whose heads can be removed.

        Raises:
            UnsupportedModelError: no attention has heads that can be removed.
        """
        attentions = tuple(layer for layer in self.own_attentions if layer.carriers)
        if not attentions:
            raise UnsupportedModelError(
                f"models of type {self.family.model_type} have no heads that can be removed: they have no attention, "
                "or one whose heads cannot be told apart or compute something else alone: they have a norm over all of "
                "them, or lie in an unknown order in fused tensors",
                "prune-layers, prune-ffn and share-attention may work: `prunecli inspect` shows what can be removed.",
            )
        return attentions

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

    def part(self, name: str) -> Part:
        """Return the part that a tensor is counted under, or "other" if the family does not declare the tensor."""
        # An alias that is kept because its values differ counts as what it should equal.
        declared = self.tensors.get(name) or self.tensors.get(self.family.tied.get(name, ""))
        return declared[1] if declared else "other"

    @cached_property
    def _layer_names(self) -> frozenset[str]:
        return frozenset(map(layer_of, self.shapes)) - {""}

    def is_extra(self, name: str) -> bool:
        """Whether a tensor belongs to a part that only some classes of the family have, and that no method changes."""
        found = self.family.found
        if found is None:
            return not self.family.stacks
        # The class would leave a tensor of its layers out, and compute something else (positions of older classes).
        return (
            self.family.mixture is not None or layer_of(name) not in self._layer_names or found.ignores(name)
        )

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
    if family.found is not None:
        family = family.found.tried(family, structure)
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


def _changed(layout: ModelLayout, tensors: dict[str, Declared]) -> dict[str, Declared]:
    """The tensors of the stock model with the widths and heads that each layer has now, without those that are gone."""
    gone = {*layout.ties}
    if (tables := layout.tables) is not None:
        if tables.unit is not None:
            gone.update(f"{name}.weight" for name in (tables.input, *tables.aliases))
        tensors |= {name: (shape, "embeddings") for name, shape in tables.tensors.items()}
    parts: tuple[AttentionLayer | FfnLayer, ...] = (*layout.attentions, *layout.ffns)
    for layer in parts:
        gone.update(layer.shared_tensors)
        if layer.removed:
            gone.update(layer.norm_tensors, layer.stock_tensors)
        elif not layer.count:  # a tensor of no head at all is not stored
            gone.update(layer.carriers)
        elif not layer.is_shared and layer.count != layer.stated:
            for name, carrier in layer.carriers.items():
                shape, part = tensors[name]
                size = carrier.length(layer.count, shape[carrier.dim], layer.stated)
                tensors[name] = (*shape[: carrier.dim], size, *shape[carrier.dim + 1 :]), part
    return {name: declared for name, declared in tensors.items() if name not in gone}


def _found(layout: ModelLayout) -> dict[str, Declared]:
    """The tensors of a class that was asked."""
    found = layout.family.found
    stored = found.stored(layout.config)
    weights = [name.removesuffix(".weight") for name, shape in stored.items() if len(shape) == 1]
    owners: dict[str, Part] = dict.fromkeys(weights, "norm")
    owners |= {module_of(name): "ffn" for ffn in layout.ffns for name in ffn.tensor_names}
    owners |= dict.fromkeys((layer.name for layer in layout.attentions), "attention")
    owners |= dict.fromkeys(found.embeddings, "embeddings")
    owners[""] = "other"

    def part(name: str) -> Part:
        owner = module_of(name)
        return owners.get(owner) or part(owner)

    return {name: (shape, part(name)) for name, shape in stored.items()}


def _recorded(layout: ModelLayout) -> dict[str, Declared]:
    """The tensors of the stock model of a declared family."""
    sizes, family = layout.sizes, layout.family
    tensors: dict[str, Declared] = {}

    def add(
        owner: str, specs: Iterable[TensorSpec], *, experts: int = 0, part: Part | None = None
    ) -> dict[str, Declared]:
        found = {}
        for spec in specs:
            if sizes.holds(spec.optional):
                shape = tuple(experts if key == "expert_count" else sizes.count(key) for key in spec.shape)
                found[spec.name] = shape, part or spec.part
        tensors.update((f"{owner}{name}", declared) for name, declared in found.items())
        return found

    add("", family.tensors)
    for layer in layout.layers:
        for attention in layer.attentions:
            add(f"{layer.name}.", attention.spec.tensors)
        stack, name = layer.ffn.stack, layer.ffn.name
        add(f"{layer.name}.", stack.norms)
        if not layer.ffn.is_sparse:
            add(f"{name}.", stack.ffn.tensors)
            continue
        experts, mixture = expert_count(sizes, layout.structure, name), family.mixture
        assert mixture is not None
        assert mixture.expert is not None
        add(f"{name}.", stack.ffn.router, experts=experts)
        for expert in range(experts):  # there may be tens of thousands, all alike
            prefix = f"{name}.{mixture.expert.format(expert=expert)}."
            if expert == 0:
                first = add(prefix, stack.ffn.tensors, part="experts")
            tensors.update((f"{prefix}{suffix}", declared) for suffix, declared in first.items())
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
