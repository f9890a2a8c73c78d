"""What an axis is: units of one kind in one place of a model, and where they lie in its tensors."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from prunecli.architectures.records import Carrier

Kind = Literal["expert", "head", "unit", "layer", "token", "channel"]
"""What the units of an axis are; `unit` is a hidden unit of an FFN, `channel` a position of the residual stream."""


def axis_name(owner: str, kind: Kind) -> str:
    """Name of the axis along which the units of `owner` lie: of a module, or of a stack for its layers.

    "model.layers.0.self_attn.heads", "model.layers.0.mlp.experts", "encoder.layers".
    """
    return f"{owner}.{kind}s"


def module_of(name: str) -> str:
    """The owner in the name of an axis, or of a tensor: "model.encoder.layers.3.self_attn", "encoder"."""
    return name.rpartition(".")[0]


Rename = Callable[[str], str | None]
"""Name of a layer, or of what is in one -> its name where only some layers stay; None: it goes with its layer."""


def renaming(kept: Mapping[str, Sequence[int]]) -> Rename:
    """How modules and tensors are called in the model with only some layers: prefix of layers -> numbers that stay."""
    pattern = re.compile(rf"({'|'.join(map(re.escape, kept))})\.(\d+)(?=\.|$)")

    def rename(name: str) -> str | None:
        match = pattern.match(name) if kept else None
        if match is None:
            return name
        numbers, number = kept[match[1]], int(match[2])
        return f"{match[1]}.{numbers.index(number)}{name[match.end() :]}" if number in numbers else None

    return rename


@dataclass(frozen=True)
class Axis:
    """Units of one kind in one place, of which any may be removed.

    Attributes:
        name: "model.encoder.layers.3.self_attn.heads", "decoder.layers", "tokens", "channels".
        kind: of the units.
        ids: of the units that there are, in the order in which they are stored: original ids, but of hidden
            units, tokens and channels, which are numbered as the checkpoint holds them.
        original: how many there were originally.
        side: of its stack; "" of tokens and channels.
        layer: the number of its layer, as the checkpoint counts; None of layers, tokens and channels.
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
    def count(self) -> int:
        """Number of its units."""
        return len(self.ids)

    @property
    def module(self) -> str:
        """Name of the module whose parts the units are: "model.encoder.layers.3.self_attn"."""
        return module_of(self.name)
