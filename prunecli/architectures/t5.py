"""T5, T5 1.1, Flan-T5 (1910.10683) and mT5 (2010.11934): relative positions, norms without bias, heads of any width.

The table of relative positions of a stack's first layer serves all of its layers: it keeps a column for every head.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from prunecli.architectures.classes import seq2seq_classes
from prunecli.architectures.records import (
    Architecture,
    Attention,
    FeedForward,
    Side,
    Stack,
    TensorSpec,
    TokenEmbedding,
    embeddings,
    matrix,
    rms_norm,
)

HEADS = "num_heads*d_kv"
GATED = "feed_forward_proj:gated-"


def _attention(name: str, kind: Literal["self", "cross"]) -> Attention:
    positions = TensorSpec(
        f"{name}.relative_attention_bias.weight",
        ("relative_attention_num_buckets", "num_heads"),
        "attention",
        first=True,
    )
    return Attention(
        name=name,
        kind=kind,
        heads="num_heads",
        tensors=(
            *(matrix(f"{name}.{projection}", "d_model", HEADS, "attention", heads=0) for projection in "qkv"),
            matrix(f"{name}.o", HEADS, "d_model", "attention", heads=1),
            *((positions,) if kind == "self" else ()),
        ),
        output=f"{name}.o",
        norms=(f"{name.rpartition('.')[0]}.layer_norm",),
        position_bias=True,
    )


def _stack(side: Side, depth: str, attentions: tuple[Attention, ...]) -> Stack:
    last = len(attentions)
    return Stack(
        side=side,
        layers=f"{side}.block.{{layer}}",
        depth=depth,
        attentions=attentions,
        ffn=FeedForward(
            name=f"layer.{last}.DenseReluDense",
            width="d_ff",
            norms=(f"layer.{last}.layer_norm",),
            tensors=(
                TensorSpec("wi.weight", ("d_ff", "d_model"), "ffn", optional=f"!{GATED}", hidden=0),
                TensorSpec("wi_0.weight", ("d_ff", "d_model"), "ffn", optional=GATED, hidden=0),
                TensorSpec("wi_1.weight", ("d_ff", "d_model"), "ffn", optional=GATED, hidden=0),
                matrix("wo", "d_ff", "d_model", "ffn", hidden=1),
            ),
        ),
        norms=tuple(rms_norm(f"layer.{part}.layer_norm", "d_model") for part in range(last + 1)),
    )


_SELF = _attention("layer.0.SelfAttention", "self")
_CROSS = _attention("layer.1.EncDecAttention", "cross")

T5 = Architecture(
    model_type="t5",
    model_class="T5ForConditionalGeneration",
    auto_class="AutoModelForSeq2SeqLM",
    classes=seq2seq_classes("T5"),
    stacks=(
        _stack("encoder", "num_layers", (_SELF,)),
        _stack("decoder", "num_decoder_layers", (_SELF, _CROSS)),
    ),
    tensors=(
        embeddings("shared", "vocab_size", "d_model"),
        rms_norm("encoder.final_layer_norm", "d_model"),
        rms_norm("decoder.final_layer_norm", "d_model"),
    ),
    tied={
        "lm_head.weight": "shared.weight",
        "encoder.embed_tokens.weight": "shared.weight",
        "decoder.embed_tokens.weight": "shared.weight",
    },
    loose=("lm_head.weight",),
    extras=("lm_head.",),
    # The first checkpoints hold a table for cross-attention that no model reads.
    buffers=("EncDecAttention.relative_attention_bias.weight",),
    attributes={
        "vocab_size": 32128,
        "d_model": 512,
        "d_kv": 64,
        "d_ff": 2048,
        "num_layers": 6,
        "num_decoder_layers": "num_layers",
        "num_heads": 8,
        "relative_attention_num_buckets": 32,
        "feed_forward_proj": "relu",
        "tie_word_embeddings": True,
    },
    embedding=TokenEmbedding("shared", "lm_head", ("T5ForConditionalGeneration",)),
)

MT5 = replace(
    T5,
    model_type="mt5",
    model_class="MT5ForConditionalGeneration",
    classes=seq2seq_classes("MT5"),
    attributes={
        **T5.attributes,
        "vocab_size": 250112,
        "d_ff": 1024,
        "num_layers": 8,
        "num_decoder_layers": "num_layers",
        "num_heads": 6,
        "feed_forward_proj": "gated-gelu",
    },
    embedding=TokenEmbedding("shared", "lm_head", ("MT5ForConditionalGeneration",)),
)
