"""Llama 1 to 3 and models in its layout; a key/value head goes with all the query heads that share it."""

from __future__ import annotations

from typing import Literal

from prunecli.architectures.common import embeddings, rms_norm
from prunecli.architectures.records import (
    Architecture,
    Attention,
    FeedForward,
    HeadAxis,
    Stack,
    TensorSpec,
    TokenEmbedding,
)

QUERIES = "num_attention_heads*head_dim"
KEYS = "num_key_value_heads*head_dim"


def _projection(
    name: str, inputs: str, outputs: str, *, heads: Literal[0, 1]
) -> tuple[TensorSpec, TensorSpec]:
    rows = HeadAxis(0) if heads == 0 else None
    return (
        TensorSpec(f"{name}.weight", (outputs, inputs), "attention", heads=HeadAxis(heads)),
        TensorSpec(f"{name}.bias", (outputs,), "attention", optional="attention_bias", heads=rows),
    )


def _ffn(name: str, inputs: str, outputs: str, *, hidden: Literal[0, 1]) -> tuple[TensorSpec, TensorSpec]:
    rows = 0 if hidden == 0 else None
    return (
        TensorSpec(f"{name}.weight", (outputs, inputs), "ffn", hidden=hidden),
        TensorSpec(f"{name}.bias", (outputs,), "ffn", optional="mlp_bias", hidden=rows),
    )


LLAMA = Architecture(
    model_type="llama",
    model_class="LlamaForCausalLM",
    auto_class="AutoModelForCausalLM",
    stacks=(
        Stack(
            side="decoder",
            layers="model.layers.{layer}",
            depth="num_hidden_layers",
            attentions=(
                Attention(
                    name="self_attn",
                    kind="self",
                    heads="num_key_value_heads",
                    tensors=(
                        *_projection("self_attn.q_proj", "hidden_size", QUERIES, heads=0),
                        *_projection("self_attn.k_proj", "hidden_size", KEYS, heads=0),
                        *_projection("self_attn.v_proj", "hidden_size", KEYS, heads=0),
                        *_projection("self_attn.o_proj", QUERIES, "hidden_size", heads=1),
                    ),
                    output="self_attn.o_proj",
                ),
            ),
            ffn=FeedForward(
                name="mlp",
                width="intermediate_size",
                norm="post_attention_layernorm",
                tensors=(
                    *_ffn("gate_proj", "hidden_size", "intermediate_size", hidden=0),
                    *_ffn("up_proj", "hidden_size", "intermediate_size", hidden=0),
                    *_ffn("down_proj", "intermediate_size", "hidden_size", hidden=1),
                ),
            ),
            norms=(
                rms_norm("input_layernorm", "hidden_size"),
                rms_norm("post_attention_layernorm", "hidden_size"),
            ),
        ),
    ),
    tensors=(
        embeddings("model.embed_tokens", "vocab_size", "hidden_size"),
        rms_norm("model.norm", "hidden_size"),
    ),
    tied={"lm_head.weight": "model.embed_tokens.weight"},
    loose=("lm_head.weight",),
    extras=("lm_head.", "score."),
    buffers=("rotary_emb.inv_freq", "rotary_emb.original_inv_freq"),
    head_counts=("num_attention_heads", "num_key_value_heads"),
    head_width="head_dim",
    attributes={
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": "num_attention_heads",
        "head_dim": "hidden_size/num_attention_heads",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    },
    embedding=TokenEmbedding("model.embed_tokens", "lm_head", ("LlamaForCausalLM",), apart=True),
)
