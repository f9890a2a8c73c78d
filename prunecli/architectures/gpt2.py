"""GPT-2: query, key and value fused in one matrix, which is stored as `[in, out]`, as all of its matrices are."""

from __future__ import annotations

from typing import Literal

from prunecli.architectures.classes import GPT2_CLASSES
from prunecli.architectures.records import (
    Architecture,
    Attention,
    FeedForward,
    HeadAxis,
    Part,
    Stack,
    TensorSpec,
    TokenEmbedding,
    embeddings,
    norm,
)

FUSED = ("1", "1", "1")
"""Query, key and value."""


def _linear(
    name: str,
    inputs: str,
    outputs: str,
    part: Part,
    *,
    weight: HeadAxis | None = None,
    bias: HeadAxis | None = None,
    hidden: Literal[0, 1] | None = None,
) -> tuple[TensorSpec, TensorSpec]:
    return (
        TensorSpec(f"{name}.weight", (inputs, outputs), part, heads=weight, hidden=hidden),
        TensorSpec(f"{name}.bias", (outputs,), part, heads=bias, hidden=0 if hidden == 1 else None),
    )


_ATTENTION = Attention(
    name="attn",
    kind="self",
    heads="n_head",
    tensors=(
        *_linear(
            "attn.c_attn",
            "n_embd",
            "3*n_embd",
            "attention",
            weight=HeadAxis(1, FUSED),
            bias=HeadAxis(0, FUSED),
        ),
        *_linear("attn.c_proj", "n_embd", "n_embd", "attention", weight=HeadAxis(0)),
    ),
    output="attn.c_proj",
    norms=("ln_1",),
)

GPT2 = Architecture(
    model_type="gpt2",
    model_class="GPT2LMHeadModel",
    auto_class="AutoModelForCausalLM",
    classes=GPT2_CLASSES,
    stacks=(
        Stack(
            side="decoder",
            layers="transformer.h.{layer}",
            depth="n_layer",
            attentions=(_ATTENTION,),
            ffn=FeedForward(
                name="mlp",
                width="n_inner",
                norms=("ln_2",),
                tensors=(
                    *_linear("c_fc", "n_embd", "n_inner", "ffn", hidden=1),
                    *_linear("c_proj", "n_inner", "n_embd", "ffn", hidden=0),
                ),
            ),
            norms=(*norm("ln_1", "n_embd"), *norm("ln_2", "n_embd")),
        ),
    ),
    tensors=(
        embeddings("transformer.wte", "vocab_size", "n_embd"),
        embeddings("transformer.wpe", "n_positions", "n_embd"),
        *norm("transformer.ln_f", "n_embd"),
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
