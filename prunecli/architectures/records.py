"""What a model family is made of, as frozen records. A family is a value of `Architecture`: data, no logic.

Shapes name keys of config.json (`d_model`); `expert_count` stands for the number of experts of the layer at hand.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Part = Literal["embeddings", "attention", "ffn", "experts", "router", "norm"]
Side = Literal["encoder", "decoder"]


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of the family's stock layout.

    Attributes:
        name: relative to its owner (the model, a layer, an FFN, an expert): `self_attn.q_proj.weight`.
        shape: config keys, `[out, in]` for a linear layer's weight.
        part: what `inspect` counts it under.
        optional: a config key that must be true for the tensor to exist (`router_bias`), or None.
    """

    name: str
    shape: tuple[str, ...]
    part: Part
    optional: str | None = None


def linear(name: str, inputs: str, outputs: str, part: Part) -> tuple[TensorSpec, TensorSpec]:
    """Weight `[outputs, inputs]` and bias `[outputs]` of a linear layer."""
    return TensorSpec(f"{name}.weight", (outputs, inputs), part), TensorSpec(f"{name}.bias", (outputs,), part)


def norm(name: str, width: str) -> tuple[TensorSpec, TensorSpec]:
    """Weight and bias `[width]` of a layer norm."""
    return TensorSpec(f"{name}.weight", (width,), "norm"), TensorSpec(f"{name}.bias", (width,), "norm")


@dataclass(frozen=True)
class Attention:
    """One attention of a layer; `name` is relative to the layer."""

    name: str
    kind: Literal["self", "cross"]
    heads: str
    """Config key that holds the number of heads."""
    tensors: tuple[TensorSpec, ...]


@dataclass(frozen=True)
class FeedForward:
    """A layer's FFN, dense or sparse; the tensors' names are relative to the FFN.

    Attributes:
        name: relative to the layer.
        width: config key of the hidden width.
        tensors: those of a dense FFN, and of every expert.
        router: those of a sparse layer's router; its first axis is the expert.
        expert: prefix of one expert, relative to the FFN; `{expert}` is its number.
        sparse_step: config key: every n-th layer is sparse, none where it is absent or 0.
    """

    name: str
    width: str
    tensors: tuple[TensorSpec, ...]
    router: tuple[TensorSpec, ...] = ()
    expert: str | None = None
    sparse_step: str | None = None


@dataclass(frozen=True)
class Stack:
    """A column of like layers: the encoder or the decoder.

    Attributes:
        side: which of the two; a model with one stack has the side of its kind.
        layers: prefix of one layer; `{layer}` is its number.
        depth: config key of the number of layers.
        norms: the layer's norms, relative to the layer.
    """

    side: Side
    layers: str
    depth: str
    attentions: tuple[Attention, ...]
    ffn: FeedForward
    norms: tuple[TensorSpec, ...]


@dataclass(frozen=True)
class Architecture:
    """A model family in its stock Hugging Face layout.

    Attributes:
        model_type: as in config.json.
        model_class: the class of transformers that runs it.
        auto_class: the `AutoModel…` that opens it.
        stacks: encoder, decoder, or one of them.
        tensors: those outside of the layers.
        tied: other names under which a tensor may appear or may be left out: {alias: stored name}.
        buffers: name endings of tensors that older checkpoints hold although the model computes them.
        top_k: experts per token, or None where no layer is sparse.
        expert_count: every config key that holds the number of experts.
        token_dropout: config key of the inference-time scale (1 - p) of expert outputs.
        attributes: config defaults of transformers for keys that a config.json may leave out.
    """

    model_type: str
    model_class: str
    auto_class: str
    stacks: tuple[Stack, ...]
    tensors: tuple[TensorSpec, ...]
    tied: dict[str, str] = field(default_factory=dict)
    buffers: tuple[str, ...] = ()
    top_k: int | None = None
    expert_count: tuple[str, ...] = ()
    token_dropout: str | None = None
    attributes: dict[str, int | float | bool | str] = field(default_factory=dict)
