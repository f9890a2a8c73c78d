"""Mistral: Llama's layout without biases; the window of its attention changes no tensor (2310.06825)."""

from __future__ import annotations

from dataclasses import replace

from prunecli.architectures.classes import decoder_classes
from prunecli.architectures.common import llama_stack
from prunecli.architectures.llama import LLAMA
from prunecli.architectures.records import TokenEmbedding

MISTRAL = replace(
    LLAMA,
    model_type="mistral",
    model_class="MistralForCausalLM",
    classes=decoder_classes("Mistral"),
    heads_divide=None,
    stacks=(llama_stack({}),),
    attributes={
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": "hidden_size/num_attention_heads",
        "tie_word_embeddings": False,
    },
    embedding=TokenEmbedding("model.embed_tokens", "lm_head", ("MistralForCausalLM",), apart=True),
)
