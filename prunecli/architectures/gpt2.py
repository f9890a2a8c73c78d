"""GPT-2: query, key and value fused in one matrix, which is stored as `[in, out]`, as all of its matrices are."""

from __future__ import annotations

from functools import partial

from prunecli.architectures.classes import GPT2_HEADS, model_classes
from prunecli.architectures.records import (
    Architecture,
    Attention,
    TokenEmbedding,
    embeddings,
    feed_forward,
    linear,
    norm,
    stack,
)

FUSED = ("1", "1", "1")
"""Query, key and value."""

_NORM = partial(norm, width="n_embd")
_ATTENTION = Attention(
    name="attn",
    kind="self",
    heads="n_head",
    tensors=(
        *linear("attn.c_attn", "n_embd", "3*n_embd", "attention", units=0, turned=True, blocks=FUSED),
        *linear("attn.c_proj", "n_embd", "n_embd", "attention", units=1, turned=True),
    ),
    output="attn.c_proj",
    norms=("ln_1",),
)
_FFN = feed_forward("mlp", "n_inner", ("ln_2",), ("c_fc", "c_proj"), "n_embd", turned=True)

GPT2 = Architecture(
    model_type="gpt2",
    model_class="GPT2LMHeadModel",
    auto_class="AutoModelForCausalLM",
    classes=model_classes("GPT2", GPT2_HEADS),
    stacks=(stack("decoder", "transformer.h.{layer}", "n_layer", [_ATTENTION], _FFN, _NORM),),
    tensors=(
        embeddings("transformer.wte", "vocab_size", "n_embd"),
        embeddings("transformer.wpe", "n_positions", "n_embd"),
        *_NORM("transformer.ln_f"),
    ),
    tied={"lm_head.weight": "transformer.wte.weight"},
    loose=("lm_head.weight",),
    extras=("lm_head.", "score.", "classifier.", "qa_outputs.", "multiple_choice_head."),
    buffers=("attn.bias", "attn.masked_bias"),
    attributes={
        "vocab_size": 50257,
        "n_positions": 1024,
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "n_inner": "4*n_embd",
        "tie_word_embeddings": True,
        "scale_attn_by_inverse_layer_idx": False,
    },
    embedding=TokenEmbedding(
        "transformer.wte", "lm_head", ("GPT2LMHeadModel", "GPT2DoubleHeadsModel"), apart=True
    ),
    numbered="scale_attn_by_inverse_layer_idx",
)
