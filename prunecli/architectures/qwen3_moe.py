"""Qwen3, the mixtures of experts: Qwen3's layout, its FFNs sparse but for those that config.json names (2505.09388)."""

from __future__ import annotations

from dataclasses import replace

from prunecli.architectures.classes import decoder_classes
from prunecli.architectures.common import gated_ffn, matrix
from prunecli.architectures.mixtures import EXPERTS_ONLY
from prunecli.architectures.qwen3 import QWEN3
from prunecli.architectures.records import TokenEmbedding

(_STACK,) = QWEN3.stacks

QWEN3_MOE = replace(
    QWEN3,
    model_type="qwen3_moe",
    model_class="Qwen3MoeForCausalLM",
    classes=decoder_classes("Qwen3Moe"),
    stacks=(
        replace(
            _STACK,
            ffn=replace(
                _STACK.ffn,
                router=(matrix("gate", "hidden_size", "expert_count", "router"),),
                expert=gated_ffn(("gate_proj", "up_proj", "down_proj"), "moe_intermediate_size"),
                expert_width="moe_intermediate_size",
                sparse_step="decoder_sparse_step",
                dense_layers="mlp_only_layers",
            ),
        ),
    ),
    mixture=EXPERTS_ONLY["qwen3_moe"].mixture,
    attributes={
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": "hidden_size/num_attention_heads",
        "num_local_experts": 128,
        "decoder_sparse_step": 1,
        "attention_bias": False,
        "tie_word_embeddings": False,
    },
    embedding=TokenEmbedding("model.embed_tokens", "lm_head", ("Qwen3MoeForCausalLM",), apart=True),
    window_start=None,
)
