"""The axes of a model: the layers, heads, hidden units, experts and tokens that it holds, and where they lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from prunecli.errors import CheckpointError, UnsupportedModelError
from prunecli.tensors.stream import joined

if TYPE_CHECKING:
    from prunecli.model.checkpoint import Checkpoint

Kind = Literal["expert", "head", "unit", "layer", "token"]
"""What the units of an axis are; `unit` is a hidden unit of an FFN."""

VOCABULARY = "vocab_size"


@dataclass(frozen=True)
class Carrier:
    """Where the units of an axis lie in one tensor.

    Attributes:
        dim: of the tensor.
        blocks: all units occur on it once for each of these: the width of one unit there, relative to the others.
    """

    dim: int
    blocks: tuple[int, ...] = (1,)

    def unit(self, size: int, held: int) -> int:
        """What the widths in `blocks` are multiples of, on a dimension of length `size` that holds `held` units."""
        return size // (sum(self.blocks) * held)

    def ranges(self, places: Sequence[int], size: int, held: int) -> tuple[tuple[int, int], ...]:
        """Index ranges (start, stop) of the units at `places`, ascending; neighbours are joined."""
        unit = self.unit(size, held)
        found, start = [], 0
        for block in self.blocks:
            width = block * unit
            found += [(start + place * width, start + (place + 1) * width) for place in places]
            start += held * width
        return tuple(joined(found))


@dataclass(frozen=True)
class Axis:
    """Units of one kind in one place, of which any may be removed.

    Attributes:
        name: "model.encoder.layers.3.self_attn.heads", "decoder.layers", "tokens".
        kind: of the units.
        ids: of the units that there are, in the order in which they are stored: original ids, but of hidden units and
            tokens, which are numbered as the checkpoint holds them.
        original: how many there were originally.
        side: of its stack; "" of tokens.
        layer: the number of its layer, as the checkpoint counts; None of layers and tokens.
        attention: "encoder", "decoder" or "cross"; "" where the units are no heads.
        carriers: name of a tensor -> where the units lie in it.
        members: "…experts.expert_{}": what the names begin with of the tensors that one unit alone has; "{}" stands for
            its place.
        parts: how these names go on: "fc1.weight".
        keys: of config.json, that state how many there are and that no structure does.
    """

    name: str
    kind: Kind
    ids: tuple[int, ...]
    original: int
    side: str = ""
    layer: int | None = None
    attention: str = ""
    carriers: Mapping[str, Carrier] = field(default_factory=dict)
    members: str = ""
    parts: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()

    @property
    def module(self) -> str:
        """Name of the module whose parts the units are: "model.encoder.layers.3.self_attn"."""
        return self.name.rpartition(".")[0]


def axes_of(checkpoint: Checkpoint, kind: Kind) -> tuple[Axis, ...]:
    """The axes of one kind, in the order of the model.

    Raises:
        UnsupportedModelError: the family is not declared; of tokens: another size equals that of the vocabulary, so
            that an axis of one cannot be told from one of the other.
        CheckpointError: config.json or the weights are damaged.
    """
    if kind == "expert":
        return tuple(
            Axis(
                f"{layer.name}.experts",
                kind,
                layer.experts,
                layer.original_experts,
                layer.side,
                layer.layer,
                carriers={name: Carrier(dim) for name, dim in layer.cut.items()},
                members=layer.expert_prefix.replace("{expert}", "{}"),
                parts=layer.expert_tensors,
            )
            for layer in checkpoint.mixtures
        )
    if kind == "token":
        size = vocabulary_size(checkpoint)
        config = checkpoint.config
        keys = [key for key, value in config.items() if key.endswith(VOCABULARY) and value == size]
        ids = tuple(range(size))
        carriers = _token_carriers(checkpoint)
        return (Axis("tokens", kind, ids, size, carriers=carriers, keys=(VOCABULARY, *keys)),)
    layout = checkpoint.layout
    if kind == "head":
        return tuple(
            Axis(
                f"{layer.name}.heads",
                kind,
                layer.heads,
                layer.original_heads,
                layer.stack.side,
                layer.layer,
                layer.kind,
                layer.tensors,
            )
            for layer in layout.own_attentions
        )
    if kind == "unit":
        return tuple(
            Axis(
                f"{ffn.name}.units",
                kind,
                tuple(range(ffn.width)),
                ffn.width,
                ffn.side,
                ffn.layer,
                carriers={
                    f"{ffn.prefix}{name}": Carrier(dim, (1,) * ffn.blocks[name])
                    for name, dim in ffn.tensors.items()
                    if dim is not None
                },
            )
            for ffn in layout.ffns
            if ffn.tensors and not ffn.is_shared
        )
    structure, axes = layout.structure, []
    for stack in layout.family.stacks:
        depth = layout.sizes.depth(stack)
        ids = structure.layers.get(stack.side, tuple(range(depth)))
        original = structure.original_layers.get(stack.side, depth)
        members = stack.layers.replace("{layer}", "{}")
        axes.append(Axis(f"{stack.side}.layers", kind, ids, original, stack.side, members=members))
    return tuple(axes)


def vocabulary_size(checkpoint: Checkpoint) -> int:
    """Rows of the token embeddings.

    Raises:
        CheckpointError: config.json holds no such number.
    """
    size = checkpoint.layout.sizes.value(VOCABULARY)
    if type(size) is not int or size < 1:
        raise CheckpointError(f'{checkpoint.path}: config.json: "{VOCABULARY}" is {size!r}, not a count')
    return size


def _token_carriers(checkpoint: Checkpoint) -> dict[str, Carrier]:
    """Of declared tensors the dimension that grows with the vocabulary; of the parts that only some classes of a family
    have (`final_logits_bias`, `lm_head.bias`) the one that is as long as it."""
    layout, size = checkpoint.layout, vocabulary_size(checkpoint)
    shapes = layout.shapes
    grown = layout.changed(config={**layout.config, VOCABULARY: size + 1}).shapes
    carriers: dict[str, Carrier] = {}
    config = checkpoint.config
    for name, info in checkpoint.tensors.items():
        if name in shapes:
            for dim, (one, other) in enumerate(zip(shapes[name], grown[name], strict=True)):
                if one != other:
                    carriers[name] = Carrier(dim)
        elif layout.is_extra(name) and size in info.shape:
            # A task head of as many labels as tokens, or of a model as wide, looks like an output layer.
            others = [key for key, value in config.items() if value == size and not key.endswith(VOCABULARY)]
            if len(config.get("id2label") or ()) == size:
                others.append("id2label")
            if others:
                raise UnsupportedModelError(
                    f"{checkpoint.path}: {name} may have an axis of tokens or of {others[0]}: both count {size}",
                    "trim-vocabulary cannot tell which; resize the embeddings by a row first.",
                )
            carriers[name] = Carrier(info.shape.index(size))
    return carriers
