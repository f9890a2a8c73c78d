"""SmolLM3: Llama's layout; that some layers have no rotary positions changes no tensor."""

from __future__ import annotations

from dataclasses import replace

from prunecli.architectures.classes import decoder_classes
from prunecli.architectures.llama import LLAMA
from prunecli.architectures.records import TokenEmbedding

SMOLLM3 = replace(
    LLAMA,
    model_type="smollm3",
    model_class="SmolLM3ForCausalLM",
    classes=decoder_classes("SmolLM3"),
    heads_divide=None,
    no_rope_interval="no_rope_layer_interval",
    attributes={
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": "hidden_size/num_attention_heads",
        "attention_bias": False,
        "mlp_bias": False,
        "no_rope_layer_interval": 4,
        "tie_word_embeddings": True,
    },
    embedding=TokenEmbedding("model.embed_tokens", "lm_head", ("SmolLM3ForCausalLM",), apart=True),
)
