"""Operations of a forward pass, counted from the declared architecture: matrix products of weights alone.

Left out are attention's scores and weighted sums (they grow with the length of a sentence, and are small beside the
products up to about d_model tokens), norms, activations, and units in the place of a table of embeddings.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

from prunecli.architectures import Architecture
from prunecli.architectures.records import Attention, Side
from prunecli.model.declared import class_names
from prunecli.model.ffn import FfnLayer
from prunecli.model.layout import ModelLayout

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Products:
    """Multiply-adds of one token; an operation is half of one.

    Attributes:
        encoder: in the encoder's layers, per source token.
        cross: keys and values of cross-attention, per source token of a pair.
        decoder: in the decoder's layers but for these, per target token.
        output: of the output layer, per token of the model's last stack; 0 where the class has none.
    """

    encoder: int
    cross: int
    decoder: int
    output: int

    def operations(self, sources: int, pair_sources: int, targets: int, *, output: bool) -> int:
        """Operations (two a multiply-add) of a pass.

        Args:
            sources: tokens that the encoder reads.
            pair_sources: source tokens over all pairs: a source that serves several pairs is encoded once, and
                attended to by each.
            targets: tokens that the decoder reads, over all pairs.
            output: whether the output layer runs.
        """
        done = self.encoder * sources + self.cross * pair_sources + self.decoder * targets
        last = targets if self.decoder else sources
        return 2 * (done + self.output * last * output)


def token_products(layout: ModelLayout) -> Products:
    """What one token costs: removed heads and FFNs nothing, shared ones as often as they run, and of a sparse layer the
    router and the experts that a token is sent to.

    Raises:
        CheckpointError: config.json lacks a size, or holds one that is no count.
    """
    found: dict[Side, int] = {"encoder": 0, "decoder": 0}
    cross = 0
    for layer in layout.layers:
        for attention in layer.attentions:
            keys = _matrices(layout.shapes, layer.name, _keys_and_values(attention.spec))
            whole = _matrices(layout.shapes, layer.name, _projections(attention.spec))
            cross += keys
            found[layer.side] += whole - keys
        if not layer.ffn.removed:
            found[layer.side] += _ffn(layout, layer.ffn)
    return Products(found["encoder"], cross, found["decoder"], _output(layout))


def model_dim(family: Architecture) -> str:
    """The axis that all layers share: the width of the hidden states."""
    spec = next(
        spec for spec in family.stacks[0].ffn.tensors if spec.hidden is not None and len(spec.shape) == 2
    )
    assert spec.hidden is not None
    return spec.shape[1 - spec.hidden]


def _projections(attention: Attention) -> list[str]:
    """Names of an attention's matrices, the query's first; a table of relative positions is none."""
    return [spec.name for spec in attention.tensors if spec.heads is not None and len(spec.shape) == 2]


def _keys_and_values(attention: Attention) -> list[str]:
    """Those of them that cross-attention applies to the encoder's output."""
    if attention.kind != "cross":
        return []
    _query, *rest = (name for name in _projections(attention) if not name.startswith(f"{attention.output}."))
    return rest


def _ffn(layout: ModelLayout, ffn: FfnLayer) -> int:
    owner, record, shapes = ffn.prefix.removesuffix("."), ffn.stack.ffn, layout.shapes
    dense = [spec.name for spec in record.tensors if spec.hidden is not None]
    if not ffn.is_sparse:
        return _matrices(shapes, owner, dense)
    router = [spec.name for spec in record.router]
    experts = next((shape[0] for name in router if (shape := shapes.get(f"{owner}.{name}"))), 0)
    chosen = min(layout.family.top_k or 1, experts)
    expert = f"{owner}.{str(record.expert).format(expert=0)}"
    return _matrices(shapes, owner, router) + chosen * _matrices(shapes, expert, dense)


def _output(layout: ModelLayout) -> int:
    family, tables = layout.family, layout.tables
    if family.embedding is None or tables is None:
        return 0
    if not set(class_names(layout.config) or (family.model_class,)) & set(family.embedding.classes):
        return 0
    change = tables.change.output
    if change is None or change.map_dim is None:
        return tables.vocabulary * tables.model_dim
    return (tables.vocabulary + tables.model_dim) * change.map_dim


def _matrices(shapes: Shapes, owner: str, names: Iterable[str]) -> int:
    """Multiply-adds of one row times each of the matrices that the model has."""
    found = (shapes.get(f"{owner}.{name}", ()) for name in names)
    return sum(prod(shape) for shape in found if len(shape) == 2)
