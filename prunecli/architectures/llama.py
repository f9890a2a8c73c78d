"""Llama and the dense decoders in its layout: Mistral, Qwen2, Qwen3, SmolLM3, Gemma 2 and 3, Phi-3."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from prunecli.architectures.classes import DECODER_HEADS, GEMMA3_HEADS, model_classes
from prunecli.architectures.records import (
    Architecture,
    Attention,
    FeedForward,
    Part,
    Stack,
    TensorSpec,
    TokenEmbedding,
    UnitAxis,
    embeddings,
    linear,
    norm,
    stack,
)

own_norm = partial(norm, width="hidden_size", bias=False)
QKV = ("q_proj", "k_proj", "v_proj")
ATTENTION_BIASES = dict.fromkeys((*QKV, "o_proj"), "attention_bias")


def llama_stack(
    biases: Mapping[str, str | bool],
    head_norms: Sequence[str] = (),
    *,
    attention_norms: tuple[str, ...] = ("input_layernorm",),
    ffn_norms: tuple[str, ...] = ("post_attention_layernorm",),
) -> Stack:
    """Llama's decoder: attention whose key/value heads are shared by several query heads, and a gated FFN.

    Args:
        biases: the projections that have a bias (`q_proj`, `down_proj`) -> whether, or on which condition.
        head_norms: norms of the width of one head, which all of an attention's heads share (`q_norm`).
        attention_norms, ffn_norms: around the attention and the FFN; of two the second is after it.
    """
    queries, keys = "num_attention_heads*head_dim", "num_key_value_heads*head_dim"

    def projection(name: str, inputs: str, outputs: str, lies: Literal[0, 1]) -> tuple[TensorSpec, ...]:
        part: Part = "attention" if name.startswith("self_attn.") else "ffn"
        bias = biases.get(name.rpartition(".")[2], False)
        return linear(name, inputs, outputs, part, units=lies, bias=bias)

    attention = Attention(
        name="self_attn",
        kind="self",
        heads="num_key_value_heads",
        queries="num_attention_heads",
        tensors=(
            *projection("self_attn.q_proj", "hidden_size", queries, 0),
            *projection("self_attn.k_proj", "hidden_size", keys, 0),
            *projection("self_attn.v_proj", "hidden_size", keys, 0),
            *projection("self_attn.o_proj", queries, "hidden_size", 1),
            *(spec for name in head_norms for spec in norm(f"self_attn.{name}", "head_dim", bias=False)),
        ),
        output="self_attn.o_proj",
        norms=attention_norms,
        residual=attention_norms[1] if len(attention_norms) > 1 else None,
    )
    ffn = FeedForward(
        name="mlp",
        width="intermediate_size",
        norms=ffn_norms,
        tensors=(
            *projection("gate_proj", "hidden_size", "intermediate_size", 0),
            *projection("up_proj", "hidden_size", "intermediate_size", 0),
            *projection("down_proj", "intermediate_size", "hidden_size", 1),
        ),
        residual=ffn_norms[1] if len(ffn_norms) > 1 else None,
    )
    return stack("decoder", "model.layers.{layer}", "num_hidden_layers", [attention], ffn, own_norm)


def like_llama(model_type: str, name: str, base: Architecture | None = None, **fields: Any) -> Architecture:
    """A family that differs from `base` (default: Llama) in `fields`; its classes' names begin with `name`."""
    model_class = f"{name}ForCausalLM"
    named: dict[str, Any] = {
        "model_type": model_type,
        "model_class": model_class,
        "classes": model_classes(name, DECODER_HEADS),
        "embedding": TokenEmbedding("model.embed_tokens", "lm_head", (model_class,), apart=True),
        **fields,
    }
    return replace(base or LLAMA, **named)


_SIZES: dict[str, int | float | bool | str] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": "hidden_size/num_attention_heads",
    "tie_word_embeddings": False,
}

LLAMA = Architecture(
    model_type="llama",
    model_class="LlamaForCausalLM",
    auto_class="AutoModelForCausalLM",
    classes=model_classes("Llama", DECODER_HEADS),
    stacks=(
        llama_stack({**ATTENTION_BIASES, **dict.fromkeys(("gate_proj", "up_proj", "down_proj"), "mlp_bias")}),
    ),
    tensors=(
        embeddings("model.embed_tokens", "vocab_size", "hidden_size"),
        *own_norm("model.norm"),
    ),
    tied={"lm_head.weight": "model.embed_tokens.weight"},
    loose=("lm_head.weight",),
    extras=("lm_head.", "score."),
    buffers=("rotary_emb.inv_freq", "rotary_emb.original_inv_freq"),
    head_counts=("num_attention_heads", "num_key_value_heads"),
    head_width="head_dim",
    heads_divide="hidden_size",
    attributes={
        **_SIZES,
        "intermediate_size": 11008,
        "num_key_value_heads": "num_attention_heads",
        "attention_bias": False,
        "mlp_bias": False,
    },
    embedding=TokenEmbedding("model.embed_tokens", "lm_head", ("LlamaForCausalLM",), apart=True),
)
# 2310.06825. The window of its attention changes no tensor.
MISTRAL = like_llama("mistral", "Mistral", heads_divide=None, stacks=(llama_stack({}),), attributes=_SIZES)
# Also Qwen2.5; the dense models (2407.10671).
QWEN2 = like_llama(
    "qwen2",
    "Qwen2",
    MISTRAL,
    stacks=(llama_stack(dict.fromkeys(QKV, True)),),
    attributes={
        **_SIZES,
        "vocab_size": 151936,
        "intermediate_size": 22016,
        "max_window_layers": 28,
        "num_key_value_heads": 32,
    },
    window_start="max_window_layers",
)
# The dense models (2505.09388).
QWEN3 = like_llama(
    "qwen3",
    "Qwen3",
    QWEN2,
    stacks=(llama_stack(ATTENTION_BIASES, ("q_norm", "k_norm")),),
    attributes={**QWEN2.attributes, "head_dim": 128, "attention_bias": False},
)
# Some layers have no rotary positions, which changes no tensor.
SMOLLM3 = like_llama(
    "smollm3",
    "SmolLM3",
    heads_divide=None,
    no_rope_interval="no_rope_layer_interval",
    attributes={
        **LLAMA.attributes,
        "vocab_size": 128256,
        "hidden_size": 2048,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "no_rope_layer_interval": 4,
        "tie_word_embeddings": True,
    },
)

gemma_stack = partial(
    llama_stack,
    ATTENTION_BIASES,
    attention_norms=("input_layernorm", "post_attention_layernorm"),
    ffn_norms=("pre_feedforward_layernorm", "post_feedforward_layernorm"),
)
"""Llama's decoder with norms on both sides of each component; takes `head_norms`."""

# Capped scores and logits (2408.00118).
GEMMA2 = like_llama(
    "gemma2",
    "Gemma2",
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
    window_period=2,
)
# The text models (2503.19786).
GEMMA3 = like_llama(
    "gemma3_text",
    "Gemma3",
    GEMMA2,
    classes=model_classes("Gemma3", GEMMA3_HEADS, "TextModel"),
    stacks=(gemma_stack(("q_norm", "k_norm")),),
    # As the text part of an image model is saved, by transformers 4 and 5.
    prefixes={
        "language_model.model.": "model.",
        "language_model.lm_head.": "lm_head.",
        "model.language_model.": "model.",
    },
    buffers=(
        "embed_tokens.embed_scale",
        *(
            f"rotary_emb.{kind}_{name}"
            for kind in ("full_attention", "sliding_attention")
            for name in ("inv_freq", "original_inv_freq")
        ),
    ),
    attributes={**GEMMA2.attributes, "vocab_size": 262208},
    window_period=6,
)

_QUERIES = "num_attention_heads*head_dim"
_FUSED = "num_key_value_heads*2+num_attention_heads*head_dim"
_LLAMA_STACK = LLAMA.stacks[0]
_PHI3_STACK = replace(
    _LLAMA_STACK,
    attentions=(
        replace(
            _LLAMA_STACK.attentions[0],
            tensors=(
                *linear("self_attn.o_proj", _QUERIES, "hidden_size", "attention", units=1, bias=False),
                *linear(
                    "self_attn.qkv_proj",
                    "hidden_size",
                    _FUSED,
                    "attention",
                    units=0,
                    bias=False,
                    blocks=("num_attention_heads/num_key_value_heads", "1", "1"),
                ),
            ),
        ),
    ),
    ffn=replace(
        _LLAMA_STACK.ffn,
        tensors=(
            TensorSpec(
                "gate_up_proj.weight",
                ("2*intermediate_size", "hidden_size"),
                "ffn",
                units=UnitAxis(0, ("1", "1")),
            ),
            *linear("down_proj", "intermediate_size", "hidden_size", "ffn", units=1, bias=False),
        ),
    ),
)
# Also Phi-3.5 and Phi-4 (2404.14219): query, key and value in one matrix, gate and up in another.
PHI3 = like_llama(
    "phi3",
    "Phi3",
    stacks=(_PHI3_STACK,),
    heads_divide=None,
    # transformers checks the factors of long contexts against the width of the model over its heads.
    heads_bound=("rope_scaling", "rope_parameters.short_factor"),
    attributes={
        **_SIZES,
        "vocab_size": 32064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_key_value_heads": "num_attention_heads",
    },
)
