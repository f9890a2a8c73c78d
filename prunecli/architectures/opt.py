"""OPT: BART's decoder layers alone; embeddings may be narrower than the layers, as in OPT-350M (2205.01068)."""

from __future__ import annotations

from dataclasses import replace

from prunecli.architectures.classes import OPT_CLASSES
from prunecli.architectures.records import (
    Architecture,
    Attention,
    FeedForward,
    Stack,
    TensorSpec,
    TokenEmbedding,
    embeddings,
    linear,
    matrix,
    norm,
)

BIAS, AFFINE = "enable_bias", "layer_norm_elementwise_affine"
NARROW = "!word_embed_proj_dim=hidden_size"
LAST_NORM = f"do_layer_norm_before&!_remove_final_layer_norm&{AFFINE}"


def _biased(*specs: TensorSpec) -> tuple[TensorSpec, ...]:
    """Linear layers whose biases config.json may leave out."""
    return tuple(replace(spec, optional=BIAS) if spec.name.endswith(".bias") else spec for spec in specs)


def _norm(name: str, condition: str) -> tuple[TensorSpec, ...]:
    return tuple(replace(spec, optional=condition) for spec in norm(name, "hidden_size"))


_ATTENTION = Attention(
    name="self_attn",
    kind="self",
    heads="num_attention_heads",
    tensors=(
        *_biased(*linear("self_attn.k_proj", "hidden_size", "hidden_size", "attention", heads=0)),
        *_biased(*linear("self_attn.v_proj", "hidden_size", "hidden_size", "attention", heads=0)),
        *_biased(*linear("self_attn.q_proj", "hidden_size", "hidden_size", "attention", heads=0)),
        *_biased(*linear("self_attn.out_proj", "hidden_size", "hidden_size", "attention", heads=1)),
    ),
    output="self_attn.out_proj",
    norms=("self_attn_layer_norm",),
)

OPT = Architecture(
    model_type="opt",
    model_class="OPTForCausalLM",
    auto_class="AutoModelForCausalLM",
    classes=OPT_CLASSES,
    stacks=(
        Stack(
            side="decoder",
            layers="model.decoder.layers.{layer}",
            depth="num_hidden_layers",
            attentions=(_ATTENTION,),
            ffn=FeedForward(
                name="",
                width="ffn_dim",
                norms=("final_layer_norm",),
                tensors=(
                    *_biased(*linear("fc1", "hidden_size", "ffn_dim", "ffn", hidden=0)),
                    *_biased(*linear("fc2", "ffn_dim", "hidden_size", "ffn", hidden=1)),
                ),
            ),
            norms=(*_norm("self_attn_layer_norm", AFFINE), *_norm("final_layer_norm", AFFINE)),
        ),
    ),
    tensors=(
        embeddings("model.decoder.embed_tokens", "vocab_size", "word_embed_proj_dim"),
        embeddings("model.decoder.embed_positions", "max_position_embeddings+2", "hidden_size"),
        replace(
            matrix("model.decoder.project_in", "word_embed_proj_dim", "hidden_size", "embeddings"),
            optional=NARROW,
        ),
        replace(
            matrix("model.decoder.project_out", "hidden_size", "word_embed_proj_dim", "embeddings"),
            optional=NARROW,
        ),
        *_norm("model.decoder.final_layer_norm", LAST_NORM),
    ),
    tied={"lm_head.weight": "model.decoder.embed_tokens.weight"},
    loose=("lm_head.weight",),
    extras=("lm_head.", "score.", "qa_outputs."),
    buffers=("decoder.version",),
    attributes={
        "vocab_size": 50272,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "ffn_dim": 3072,
        "max_position_embeddings": 2048,
        "num_attention_heads": 12,
        "word_embed_proj_dim": "hidden_size",
        "do_layer_norm_before": True,
        "_remove_final_layer_norm": False,
        "enable_bias": True,
        "layer_norm_elementwise_affine": True,
        "tie_word_embeddings": True,
    },
    embedding=TokenEmbedding("model.decoder.embed_tokens", "lm_head", ("OPTForCausalLM",), apart=True),
)
