"""Gemma 2: Llama's layout, a norm before and after each component, capped scores and logits (2408.00118)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from prunecli.architectures.classes import decoder_classes
from prunecli.architectures.common import llama_stack, rms_norm
from prunecli.architectures.llama import LLAMA
from prunecli.architectures.records import Stack, TokenEmbedding

BEFORE, AFTER = "pre_feedforward_layernorm", "post_feedforward_layernorm"


def gemma_stack(head_norms: Sequence[str] = ()) -> Stack:
    """Llama's decoder with norms on both sides of each component; `head_norms` as in `llama_stack`."""
    stack = llama_stack(dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), "attention_bias"), head_norms)
    attention = replace(
        stack.attentions[0],
        norms=("input_layernorm", "post_attention_layernorm"),
        residual="post_attention_layernorm",
    )
    return replace(
        stack,
        attentions=(attention,),
        ffn=replace(stack.ffn, norms=(BEFORE, AFTER), residual=AFTER),
        norms=(*stack.norms, rms_norm(BEFORE, "hidden_size"), rms_norm(AFTER, "hidden_size")),
    )


GEMMA2 = replace(
    LLAMA,
    model_type="gemma2",
    model_class="Gemma2ForCausalLM",
    classes=decoder_classes("Gemma2"),
    stacks=(gemma_stack(),),
    buffers=(*LLAMA.buffers, "embed_tokens.embed_scale"),
    attributes={
        "vocab_size": 256000,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "attention_bias": False,
        "tie_word_embeddings": True,
    },
    embedding=TokenEmbedding("model.embed_tokens", "lm_head", ("Gemma2ForCausalLM",), apart=True),
    window_period=2,
)
