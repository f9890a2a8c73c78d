"""NLLB-200 54.5B and its kin: encoder and decoder, every n-th FFN a mixture of experts (2207.04672)."""

from __future__ import annotations

from prunecli.architectures.bart import BART_SIZES, BART_TIED, LAST_NORMS, bart_attention
from prunecli.architectures.classes import seq2seq_classes
from prunecli.architectures.records import (
    Architecture,
    FeedForward,
    Mixture,
    Stack,
    TensorSpec,
    TokenEmbedding,
    linear,
    norm,
)


def _ffn(width: str, sparse_step: str) -> FeedForward:
    return FeedForward(
        name="ffn",
        width=width,
        norms=("ff_layer_norm",),
        tensors=(
            *linear("fc1", "d_model", width, "ffn", hidden=0),
            *linear("fc2", width, "d_model", "ffn", hidden=1),
        ),
        router=(
            TensorSpec("router.classifier.weight", ("expert_count", "d_model"), "router"),
            TensorSpec("router.classifier.bias", ("expert_count",), "router", optional="router_bias"),
        ),
        sparse_step=sparse_step,
    )


NLLB_MOE = Architecture(
    model_type="nllb-moe",
    model_class="NllbMoeForConditionalGeneration",
    auto_class="AutoModelForSeq2SeqLM",
    classes=seq2seq_classes("NllbMoe"),
    stock_fault="the stock routing of NLLB-MoE is wrong in transformers 5",
    stacks=(
        Stack(
            side="encoder",
            layers="model.encoder.layers.{layer}",
            depth="encoder_layers",
            attentions=(bart_attention("self_attn", "self", "encoder_attention_heads"),),
            ffn=_ffn("encoder_ffn_dim", "encoder_sparse_step"),
            norms=(*norm("self_attn_layer_norm", "d_model"), *norm("ff_layer_norm", "d_model")),
        ),
        Stack(
            side="decoder",
            layers="model.decoder.layers.{layer}",
            depth="decoder_layers",
            attentions=(
                bart_attention("self_attn", "self", "decoder_attention_heads"),
                bart_attention("cross_attention", "cross", "decoder_attention_heads"),
            ),
            ffn=_ffn("decoder_ffn_dim", "decoder_sparse_step"),
            norms=(
                *norm("self_attn_layer_norm", "d_model"),
                *norm("cross_attention_layer_norm", "d_model"),
                *norm("ff_layer_norm", "d_model"),
            ),
        ),
    ),
    tensors=(
        TensorSpec("model.shared.weight", ("vocab_size", "d_model"), "embeddings"),
        *LAST_NORMS,
    ),
    tied=BART_TIED,
    buffers=("embed_positions.weights",),
    mixture=Mixture(
        blocks=("model.encoder.layers.{layer}.ffn", "model.decoder.layers.{layer}.ffn"),
        router=("router.classifier.weight", "router.classifier.bias"),
        counts=("num_experts",),
        top_k=2,
        expert="experts.expert_{expert}",
        depth="encoder_layers",
    ),
    token_dropout="moe_token_dropout",
    attributes={
        **BART_SIZES,
        "vocab_size": 128112,
        "encoder_sparse_step": 4,
        "decoder_sparse_step": 4,
        "num_experts": 128,
        "router_bias": False,
        "moe_token_dropout": 0.2,
        "activation_function": "relu",
        "max_position_embeddings": 1024,
    },
    embedding=TokenEmbedding("model.shared", "lm_head", ("NllbMoeForConditionalGeneration",)),
)
