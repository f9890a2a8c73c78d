"""Parts that several families have in common: layers of BART, BERT and Llama, matrices and norms without a bias."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from prunecli.architectures.records import (
    Attention,
    FeedForward,
    HeadAxis,
    Part,
    Side,
    Stack,
    TensorSpec,
    linear,
    norm,
)


def matrix(
    name: str,
    inputs: str,
    outputs: str,
    part: Part,
    *,
    heads: Literal[0, 1] | None = None,
    hidden: Literal[0, 1] | None = None,
) -> TensorSpec:
    """Weight `[outputs, inputs]` of a linear layer without a bias; `heads`, `hidden`: the axis where they lie."""
    axis = None if heads is None else HeadAxis(heads)
    return TensorSpec(f"{name}.weight", (outputs, inputs), part, heads=axis, hidden=hidden)


def rms_norm(name: str, width: str) -> TensorSpec:
    """Weight `[width]` of a norm without a bias."""
    return TensorSpec(f"{name}.weight", (width,), "norm")


def embeddings(name: str, rows: str, width: str) -> TensorSpec:
    """Weight `[rows, width]` of a table of embeddings."""
    return TensorSpec(f"{name}.weight", (rows, width), "embeddings")


def bart_attention(name: str, kind: Literal["self", "cross"], heads: str) -> Attention:
    """BART's attention: `q_proj`, `k_proj`, `v_proj` and `out_proj` of width `d_model`, each with a bias."""
    inputs = tuple(
        spec
        for projection in ("q_proj", "k_proj", "v_proj")
        for spec in linear(f"{name}.{projection}", "d_model", "d_model", "attention", heads=0)
    )
    output = linear(f"{name}.out_proj", "d_model", "d_model", "attention", heads=1)
    return Attention(
        name,
        kind,
        heads,
        (*inputs, *output),
        output=f"{name}.out_proj",
        norms=(f"{name}_layer_norm",),
    )


def bart_stack(side: Side) -> Stack:
    """BART's encoder or decoder: attention, cross-attention in the decoder, and `fc1` and `fc2` in the layer itself."""
    heads, width = f"{side}_attention_heads", f"{side}_ffn_dim"
    attentions = [bart_attention("self_attn", "self", heads)]
    if side == "decoder":
        attentions.append(bart_attention("encoder_attn", "cross", heads))
    names = [*(f"{attention.name}_layer_norm" for attention in attentions), "final_layer_norm"]
    return Stack(
        side=side,
        layers=f"model.{side}.layers.{{layer}}",
        depth=f"{side}_layers",
        attentions=tuple(attentions),
        ffn=FeedForward(
            name="",
            width=width,
            norms=("final_layer_norm",),
            tensors=(
                *linear("fc1", "d_model", width, "ffn", hidden=0),
                *linear("fc2", width, "d_model", "ffn", hidden=1),
            ),
        ),
        norms=tuple(spec for name in names for spec in norm(name, "d_model")),
    )


BART_STACKS = (bart_stack("encoder"), bart_stack("decoder"))

BART_TIED = {
    "lm_head.weight": "model.shared.weight",
    "model.encoder.embed_tokens.weight": "model.shared.weight",
    "model.decoder.embed_tokens.weight": "model.shared.weight",
}

BART_SIZES: dict[str, int | float | bool | str] = {
    "d_model": 1024,
    "encoder_layers": 12,
    "decoder_layers": 12,
    "encoder_attention_heads": 16,
    "decoder_attention_heads": 16,
    "encoder_ffn_dim": 4096,
    "decoder_ffn_dim": 4096,
}
"""Defaults that all of BART's kin share."""


def bert_stack(model: str) -> Stack:
    """BERT's encoder, below `model`."""
    projections = tuple(
        spec
        for projection in ("query", "key", "value")
        for spec in linear(f"attention.self.{projection}", "hidden_size", "hidden_size", "attention", heads=0)
    )
    output = linear("attention.output.dense", "hidden_size", "hidden_size", "attention", heads=1)
    return Stack(
        side="encoder",
        layers=f"{model}.encoder.layer.{{layer}}",
        depth="num_hidden_layers",
        attentions=(
            Attention(
                name="attention",
                kind="self",
                heads="num_attention_heads",
                tensors=(*projections, *output),
                output="attention.output.dense",
                norms=("attention.output.LayerNorm",),
                projections="attention.self",
            ),
        ),
        ffn=FeedForward(
            name="",
            width="intermediate_size",
            norms=("output.LayerNorm",),
            tensors=(
                *linear("intermediate.dense", "hidden_size", "intermediate_size", "ffn", hidden=0),
                *linear("output.dense", "intermediate_size", "hidden_size", "ffn", hidden=1),
            ),
        ),
        norms=(
            *norm("attention.output.LayerNorm", "hidden_size"),
            *norm("output.LayerNorm", "hidden_size"),
        ),
    )


def bert_embeddings(model: str) -> tuple[TensorSpec, ...]:
    """BERT's three tables of embeddings and the norm after them, below `model`."""
    return (
        embeddings(f"{model}.embeddings.word_embeddings", "vocab_size", "hidden_size"),
        embeddings(f"{model}.embeddings.position_embeddings", "max_position_embeddings", "hidden_size"),
        embeddings(f"{model}.embeddings.token_type_embeddings", "type_vocab_size", "hidden_size"),
        *norm(f"{model}.embeddings.LayerNorm", "hidden_size"),
    )


BERT_SIZES: dict[str, int | float | bool | str] = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "tie_word_embeddings": True,
}
"""Defaults that BERT and RoBERTa share."""

BERT_RENAMED = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}

BERT_BUFFERS = ("embeddings.position_ids", "embeddings.token_type_ids")


def gated_ffn(names: Sequence[str], width: str) -> tuple[TensorSpec, ...]:
    """Gate, up and down projection without a bias, of these names."""
    gate, up, down = names
    return (
        matrix(gate, "hidden_size", width, "ffn", hidden=0),
        matrix(up, "hidden_size", width, "ffn", hidden=0),
        matrix(down, width, "hidden_size", "ffn", hidden=1),
    )


def llama_stack(biases: Mapping[str, str | None], head_norms: Sequence[str] = ()) -> Stack:
    """Llama's decoder: attention whose key/value heads are shared by several query heads, and a gated FFN.

    Args:
        biases: the projections that have a bias (`q_proj`, `down_proj`) -> on which condition; None: always.
        head_norms: norms of the width of one head, which all of an attention's heads share (`q_norm`).
    """
    queries, keys = "num_attention_heads*head_dim", "num_key_value_heads*head_dim"

    def projection(name: str, inputs: str, outputs: str, lies: Literal[0, 1]) -> tuple[TensorSpec, ...]:
        part: Part = "attention" if name.startswith("self_attn.") else "ffn"
        heads, hidden = (lies, None) if part == "attention" else (None, lies)
        weight, bias = linear(name, inputs, outputs, part, heads=heads, hidden=hidden)
        own = name.rpartition(".")[2]
        return (weight, replace(bias, optional=biases[own])) if own in biases else (weight,)

    return Stack(
        side="decoder",
        layers="model.layers.{layer}",
        depth="num_hidden_layers",
        attentions=(
            Attention(
                name="self_attn",
                kind="self",
                heads="num_key_value_heads",
                queries="num_attention_heads",
                tensors=(
                    *projection("self_attn.q_proj", "hidden_size", queries, 0),
                    *projection("self_attn.k_proj", "hidden_size", keys, 0),
                    *projection("self_attn.v_proj", "hidden_size", keys, 0),
                    *projection("self_attn.o_proj", queries, "hidden_size", 1),
                    *(rms_norm(f"self_attn.{name}", "head_dim") for name in head_norms),
                ),
                output="self_attn.o_proj",
                norms=("input_layernorm",),
            ),
        ),
        ffn=FeedForward(
            name="mlp",
            width="intermediate_size",
            norms=("post_attention_layernorm",),
            tensors=(
                *projection("gate_proj", "hidden_size", "intermediate_size", 0),
                *projection("up_proj", "hidden_size", "intermediate_size", 0),
                *projection("down_proj", "intermediate_size", "hidden_size", 1),
            ),
        ),
        norms=(
            rms_norm("input_layernorm", "hidden_size"),
            rms_norm("post_attention_layernorm", "hidden_size"),
        ),
    )
