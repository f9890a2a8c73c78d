"""Attentions of tiny models, restated by hand: their names, and merging."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class AttentionNames:
    """Names of one attention, relative to the layer.

    Attributes:
        name: of its module, below which its tensors lie.
        output: its last linear layer.
        norms: that belong to it.
    """

    name: str
    output: str
    norms: tuple[str, ...]


_LLAMA = AttentionNames("self_attn", "self_attn.o_proj", ("input_layernorm",))
_GEMMA = AttentionNames("self_attn", "self_attn.o_proj", ("input_layernorm", "post_attention_layernorm"))
_SELF = AttentionNames("self_attn", "self_attn.out_proj", ("self_attn_layer_norm",))
NAMES = {
    "bart": (_SELF, AttentionNames("encoder_attn", "encoder_attn.out_proj", ("encoder_attn_layer_norm",))),
    "nllb-moe": (
        _SELF,
        AttentionNames("cross_attention", "cross_attention.out_proj", ("cross_attention_layer_norm",)),
    ),
    "t5": (
        AttentionNames("layer.0.SelfAttention", "layer.0.SelfAttention.o", ("layer.0.layer_norm",)),
        AttentionNames("layer.1.EncDecAttention", "layer.1.EncDecAttention.o", ("layer.1.layer_norm",)),
    ),
    "bert": (AttentionNames("attention", "attention.output.dense", ("attention.output.LayerNorm",)),),
    "roberta": (AttentionNames("attention", "attention.output.dense", ("attention.output.LayerNorm",)),),
    "distilbert": (AttentionNames("attention", "attention.out_lin", ("sa_layer_norm",)),),
    "gpt2": (AttentionNames("attn", "attn.c_proj", ("ln_1",)),),
    "opt": (_SELF,),
    "llama": (_LLAMA,),
    "gemma2": (_GEMMA,),
    "gemma3_text": (_GEMMA,),
}
"""Layout -> self-attention, and cross-attention of a decoder beside an encoder. Llama's kin is left out."""


def names_of(layout: str) -> tuple[AttentionNames, ...]:
    """Names of a layout; "t5-gated" has T5's."""
    for key in (layout, layout.rpartition("-")[0], "llama"):
        if key in NAMES:
            return NAMES[key]
    raise KeyError(layout)


def layers_of(tensors: Iterable[str]) -> list[str]:
    """Prefixes of all layers, in order."""
    found = {match[1] for name in tensors if (match := re.match(r"(.*?\.\d+)\.", name))}
    return sorted(found, key=lambda layer: (layer.rpartition(".")[0], int(layer.rpartition(".")[2])))


def own_tensors(tensors: Iterable[str], layer: str, attention: AttentionNames) -> list[str]:
    """The tensors of one attention relative to its layer, but for norms of the layer and a table of positions."""
    aside = tuple(f"{layer}.{norm}." for norm in attention.norms)
    own = [name for name in tensors if name.startswith(f"{layer}.{attention.name}.")]
    own = [name for name in own if not name.startswith(aside) and "relative_attention_bias" not in name]
    return [name.removeprefix(f"{layer}.") for name in own]


def shared(
    tensors: Mapping[str, np.ndarray], layers: Sequence[str], attention: AttentionNames
) -> dict[str, np.ndarray]:
    """The tensors of the attentions of `layers`, each of which becomes their mean."""
    found = {}
    for name in own_tensors(tensors, layers[0], attention):
        mean = np.mean([tensors[f"{layer}.{name}"] for layer in layers], axis=0, dtype=np.float64)
        found |= {f"{layer}.{name}": mean.astype(np.float32) for layer in layers}
    return found
