"""Phi-3 and Phi-3.5, Phi-4: Llama's layers, query, key and value in one matrix, gate and up in another (2404.14219)."""

from __future__ import annotations

from dataclasses import replace

from prunecli.architectures.classes import decoder_classes
from prunecli.architectures.common import matrix
from prunecli.architectures.llama import LLAMA
from prunecli.architectures.records import Attention, FeedForward, HeadAxis, Stack, TensorSpec, TokenEmbedding

_QUERIES = "num_attention_heads*head_dim"
_FUSED = "num_key_value_heads*2+num_attention_heads*head_dim"
_LLAMA = LLAMA.stacks[0]

PHI3 = replace(
    LLAMA,
    model_type="phi3",
    model_class="Phi3ForCausalLM",
    classes=decoder_classes("Phi3"),
    stacks=(
        Stack(
            side="decoder",
            layers=_LLAMA.layers,
            depth=_LLAMA.depth,
            attentions=(
                Attention(
                    name="self_attn",
                    kind="self",
                    heads="num_key_value_heads",
                    queries="num_attention_heads",
                    tensors=(
                        matrix("self_attn.o_proj", _QUERIES, "hidden_size", "attention", heads=1),
                        TensorSpec(
                            "self_attn.qkv_proj.weight",
                            (_FUSED, "hidden_size"),
                            "attention",
                            heads=HeadAxis(0, ("num_attention_heads/num_key_value_heads", "1", "1")),
                        ),
                    ),
                    output="self_attn.o_proj",
                    norms=("input_layernorm",),
                    attributes={"num_key_value_heads": "heads"},
                    config_counts=("num_attention_heads",),
                ),
            ),
            ffn=FeedForward(
                name="mlp",
                width="intermediate_size",
                norms=_LLAMA.ffn.norms,
                tensors=(
                    TensorSpec(
                        "gate_up_proj.weight",
                        ("2*intermediate_size", "hidden_size"),
                        "ffn",
                        hidden=0,
                        hidden_blocks=2,
                    ),
                    matrix("down_proj", "intermediate_size", "hidden_size", "ffn", hidden=1),
                ),
            ),
            norms=_LLAMA.norms,
        ),
    ),
    # transformers checks the factors of long contexts against the width of the model over its heads.
    head_counts=(),
    head_width=None,
    heads_divide=None,
    attributes={
        "vocab_size": 32064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": "num_attention_heads",
        "head_dim": "hidden_size/num_attention_heads",
        "tie_word_embeddings": False,
    },
    embedding=TokenEmbedding("model.embed_tokens", "lm_head", ("Phi3ForCausalLM",), apart=True),
)
