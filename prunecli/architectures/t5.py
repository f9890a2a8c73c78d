"""T5, T5 1.1, Flan-T5 (1910.10683) and mT5 (2010.11934): relative positions, norms without bias, heads of any width.

The table of relative positions of a stack's first layer serves all of its layers: it keeps a column for every head.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
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
    attention,
    embeddings,
    linear,
    norm,
    stack,
)

HEADS = "num_heads*d_kv"
GATED = "feed_forward_proj:gated-"


_NORM = partial(norm, width="d_model", bias=False)
_WIDE = partial(linear, inputs="d_model", outputs="d_ff", part="ffn", units=0, bias=False)


def _attention(name: str, kind: Literal["self", "cross"]) -> Attention:
    positions = TensorSpec(
        f"{name}.relative_attention_bias.weight",
        ("relative_attention_num_buckets", "num_heads"),
        "attention",
        first=True,
    )
    return attention(
        name,
        kind,
        "num_heads",
        ("q", "k", "v"),
        "o",
        "d_model",
        (f"{name.rpartition('.')[0]}.layer_norm",),
        inner=HEADS,
        bias=False,
        more=[positions] if kind == "self" else [],
        position_bias=True,
    )


def _stack(side: Side, depth: str, attentions: tuple[Attention, ...]) -> Stack:
    last = f"layer.{len(attentions)}"
    tensors = (
        *_WIDE("wi", optional=f"!{GATED}"),
        *_WIDE("wi_0", optional=GATED),
        *_WIDE("wi_1", optional=GATED),
        *linear("wo", "d_ff", "d_model", "ffn", units=1, bias=False),
    )
    ffn = FeedForward(f"{last}.DenseReluDense", "d_ff", (f"{last}.layer_norm",), tensors)
    return stack(side, f"{side}.block.{{layer}}", depth, attentions, ffn, _NORM)


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
        *_NORM("encoder.final_layer_norm"),
        *_NORM("decoder.final_layer_norm"),
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
