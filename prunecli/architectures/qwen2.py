"""Qwen2 and Qwen2.5, the dense models: Llama's layout with a bias to queries, keys and values alone (2407.10671)."""

from __future__ import annotations

from dataclasses import replace

from prunecli.architectures.classes import decoder_classes
from prunecli.architectures.common import llama_stack
from prunecli.architectures.llama import LLAMA
from prunecli.architectures.records import TokenEmbedding

QWEN2 = replace(
    LLAMA,
    model_type="qwen2",
    model_class="Qwen2ForCausalLM",
    classes=decoder_classes("Qwen2"),
    heads_divide=None,
    stacks=(llama_stack(dict.fromkeys(("q_proj", "k_proj", "v_proj"))),),
    attributes={
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "max_window_layers": 28,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": "hidden_size/num_attention_heads",
        "tie_word_embeddings": False,
    },
    embedding=TokenEmbedding("model.embed_tokens", "lm_head", ("Qwen2ForCausalLM",), apart=True),
    window_start="max_window_layers",
)
