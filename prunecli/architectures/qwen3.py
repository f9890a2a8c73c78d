"""Qwen3, the dense models: Llama's layout with heads of their own width and norms of queries and keys (2505.09388)."""

from __future__ import annotations

from dataclasses import replace

from prunecli.architectures.classes import decoder_classes
from prunecli.architectures.common import llama_stack
from prunecli.architectures.llama import LLAMA
from prunecli.architectures.records import TokenEmbedding

QWEN3 = replace(
    LLAMA,
    model_type="qwen3",
    model_class="Qwen3ForCausalLM",
    classes=decoder_classes("Qwen3"),
    stacks=(
        llama_stack(
            dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), "attention_bias"), ("q_norm", "k_norm")
        ),
    ),
    heads_divide=None,
    attributes={
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "max_window_layers": 28,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "attention_bias": False,
        "tie_word_embeddings": False,
    },
    embedding=TokenEmbedding("model.embed_tokens", "lm_head", ("Qwen3ForCausalLM",), apart=True),
    window_start="max_window_layers",
)
