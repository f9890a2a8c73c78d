"""NLLB-200 54.5B and its kin: encoder and decoder, every n-th FFN a mixture of experts (2207.04672)."""

from __future__ import annotations

from collections.abc import Sequence

from prunecli.architectures.bart import BART_SIZES, BART_TIED, LAST_NORMS, bart_attention, own_norm
from prunecli.architectures.classes import seq2seq_classes
from prunecli.architectures.records import (
    Architecture,
    Attention,
    Mixture,
    Side,
    Stack,
    TensorSpec,
    TokenEmbedding,
    feed_forward,
    stack,
)


def _stack(side: Side, cross: Sequence[Attention]) -> Stack:
    router = (
        TensorSpec("router.classifier.weight", ("expert_count", "d_model"), "router"),
        TensorSpec("router.classifier.bias", ("expert_count",), "router", optional="router_bias"),
    )
    ffn = feed_forward(
        "ffn",
        f"{side}_ffn_dim",
        ("ff_layer_norm",),
        ("fc1", "fc2"),
        "d_model",
        router=router,
        sparse_step=f"{side}_sparse_step",
    )
    attentions = (bart_attention("self_attn", "self", f"{side}_attention_heads"), *cross)
    return stack(side, f"model.{side}.layers.{{layer}}", f"{side}_layers", attentions, ffn, own_norm)


NLLB_MOE = Architecture(
    model_type="nllb-moe",
    model_class="NllbMoeForConditionalGeneration",
    auto_class="AutoModelForSeq2SeqLM",
    classes=seq2seq_classes("NllbMoe"),
    stock_fault="the stock routing of NLLB-MoE is wrong in transformers 5",
    stacks=(
        _stack("encoder", ()),
        _stack("decoder", [bart_attention("cross_attention", "cross", "decoder_attention_heads")]),
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
