"""What a family's record says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from prunecli.text.choice import TaskName


@dataclass(frozen=True)
class FfnLayout:
    """The FFNs of a tiny model, restated by hand.

    Attributes:
        names: FFN -> its norm.
        tensors: of one FFN -> the axis of its hidden units; those of the output layer last.
        width_keys: config keys of their widths.
        post_norm: whether the norm comes after the residual connection.
    """

    names: Mapping[str, str]
    tensors: Mapping[str, int | None]
    width_keys: tuple[str, ...]
    post_norm: bool = False

    @property
    def output(self) -> str:
        """The last linear layer, relative to the FFN."""
        return list(self.tensors)[-1].rpartition(".")[0]


@dataclass(frozen=True)
class Family:
    """A family, or a variant of it.

    Attributes:
        model_type: as config.json has it.
        task: what it is for; it has an encoder and a decoder ("translation"), an encoder ("mlm") or a decoder ("lm").
        config: of a tiny model: 2 or 3 layers a side, 4 heads (or groups of heads) a layer.
        ffns: where its FFNs lie.
        input: modules of the input table; the first gives the tensor its name.
        output: the output layer over the vocabulary.
        norms: of a layer, in order, one before or after each of its components.
        layout_of: the family whose names and axes it has; what does not depend on them is tested on that one alone.
        template: what its tokenizer puts around one text and around two.
        float32_parts: whether it has routers or norms that compute in float32 whatever the model's type.
    """

    model_type: str
    task: TaskName
    config: Mapping[str, Any]
    ffns: FfnLayout
    input: tuple[str, ...]
    output: str
    norms: tuple[str, ...]
    layout_of: str = ""
    template: tuple[str, str] | None = None
    float32_parts: bool = False

    @property
    def tied(self) -> bool:
        """Whether input and output share a table."""
        return bool(self.config.get("tie_word_embeddings", True))

    def kin(self, model_type: str, architecture: str, changes: Mapping[str, Any], **fields: Any) -> Family:
        """Another family of the same layout, with `changes` to the config and to fields of the record."""
        own = {"model_type": model_type, "layout_of": self.layout_of or self.model_type, **fields}
        return replace(self, config={**self.config, "architectures": [architecture], **changes}, **own)

    def variant(self, changes: Mapping[str, Any], **fields: Any) -> Family:
        """A family with another config, and a layout of its own."""
        return replace(self, config={**self.config, **changes}, layout_of="", **fields)
