"""OPT: BART's decoder layers alone; embeddings may be narrower than the layers, as in OPT-350M (2205.01068)."""

from __future__ import annotations

from functools import partial

from prunecli.architectures.classes import OPT_HEADS, model_classes
from prunecli.architectures.records import (
    Architecture,
    TokenEmbedding,
    attention,
    embeddings,
    feed_forward,
    linear,
    norm,
    stack,
)

BIAS, AFFINE = "enable_bias", "layer_norm_elementwise_affine"
WORDS = "word_embed_proj_dim"
NARROW = f"!{WORDS}=hidden_size"
LAST_NORM = f"do_layer_norm_before&!_remove_final_layer_norm&{AFFINE}"

_ATTENTION = attention(
    "self_attn",
    "self",
    "num_attention_heads",
    ("k_proj", "v_proj", "q_proj"),
    "out_proj",
    "hidden_size",
    ("self_attn_layer_norm",),
    bias=BIAS,
)
_FFN = feed_forward("", "ffn_dim", ("final_layer_norm",), ("fc1", "fc2"), "hidden_size", bias=BIAS)
_NORM = partial(norm, width="hidden_size", optional=AFFINE)

OPT = Architecture(
    model_type="opt",
    model_class="OPTForCausalLM",
    auto_class="AutoModelForCausalLM",
    classes=model_classes("OPT", OPT_HEADS),
    stacks=(
        stack("decoder", "model.decoder.layers.{layer}", "num_hidden_layers", [_ATTENTION], _FFN, _NORM),
    ),
    tensors=(
        embeddings("model.decoder.embed_tokens", "vocab_size", WORDS),
        embeddings("model.decoder.embed_positions", "max_position_embeddings+2", "hidden_size"),
        *linear("model.decoder.project_in", WORDS, "hidden_size", "embeddings", bias=False, optional=NARROW),
        *linear("model.decoder.project_out", "hidden_size", WORDS, "embeddings", bias=False, optional=NARROW),
        *_NORM("model.decoder.final_layer_norm", optional=LAST_NORM),
    ),
    tied={"lm_head.weight": "model.decoder.embed_tokens.weight"},
    loose=("lm_head.weight",),
    extras=("lm_head.", "score.", "qa_outputs."),
    buffers=("decoder.version",),
    attributes={
        "vocab_size": 50272,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "ffn_dim": 3072,
        "max_position_embeddings": 2048,
        "num_attention_heads": 12,
        "word_embed_proj_dim": "hidden_size",
        "do_layer_norm_before": True,
        "_remove_final_layer_norm": False,
        "enable_bias": True,
        "layer_norm_elementwise_affine": True,
        "tie_word_embeddings": True,
    },
    embedding=TokenEmbedding("model.decoder.embed_tokens", "lm_head", ("OPTForCausalLM",), apart=True),
)
