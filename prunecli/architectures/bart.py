"""BART and its kin: mBART, M2M-100 (dense NLLB-200), Pegasus and Marian, the encoder-decoders with BART's layers."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

from prunecli.architectures.classes import BART_HEADS, seq2seq_classes
from prunecli.architectures.records import (
    Architecture,
    Attention,
    Side,
    Stack,
    TokenEmbedding,
    attention,
    embeddings,
    feed_forward,
    norm,
    stack,
)

own_norm = partial(norm, width="d_model")


def bart_attention(name: str, kind: Literal["self", "cross"], heads: str) -> Attention:
    """BART's attention: four linear layers of width `d_model`, each with a bias."""
    inputs = ("q_proj", "k_proj", "v_proj")
    return attention(name, kind, heads, inputs, "out_proj", "d_model", (f"{name}_layer_norm",))


def bart_stack(side: Side) -> Stack:
    """BART's encoder or decoder: attention, cross-attention in the decoder, and `fc1` and `fc2` in the layer itself."""
    heads = f"{side}_attention_heads"
    attentions = [bart_attention("self_attn", "self", heads)]
    if side == "decoder":
        attentions.append(bart_attention("encoder_attn", "cross", heads))
    ffn = feed_forward("", f"{side}_ffn_dim", ("final_layer_norm",), ("fc1", "fc2"), "d_model")
    return stack(side, f"model.{side}.layers.{{layer}}", f"{side}_layers", attentions, ffn, own_norm)


BART_TIED = {
    "lm_head.weight": "model.shared.weight",
    "model.encoder.embed_tokens.weight": "model.shared.weight",
    "model.decoder.embed_tokens.weight": "model.shared.weight",
}

BART_SIZES = {
    "d_model": 1024,
    "encoder_layers": 12,
    "decoder_layers": 12,
    "encoder_attention_heads": 16,
    "decoder_attention_heads": 16,
    "encoder_ffn_dim": 4096,
    "decoder_ffn_dim": 4096,
}
"""Config defaults that all of BART's kin share."""

LAST_NORMS = (*own_norm("model.encoder.layer_norm"), *own_norm("model.decoder.layer_norm"))
"""The norms after each stack of models whose layers have their norms before the sublayers."""


def _like_bart(model_type: str, model_class: str, vocab_size: int, **fields: Any) -> Architecture:
    fields = {"attributes": BART_SIZES, **fields}
    return Architecture(
        model_type=model_type,
        model_class=model_class,
        auto_class="AutoModelForSeq2SeqLM",
        stacks=(bart_stack("encoder"), bart_stack("decoder")),
        tensors=(embeddings("model.shared", "vocab_size", "d_model"), *fields.pop("tensors", ())),
        tied=BART_TIED,
        attributes={**fields.pop("attributes"), "vocab_size": vocab_size},
        embedding=TokenEmbedding("model.shared", "lm_head", (model_class,)),
        **fields,
    )


_BART: dict[str, Any] = {
    # Learned positions, from the third row of their table on.
    "tensors": (
        embeddings("model.encoder.embed_positions", "max_position_embeddings+2", "d_model"),
        embeddings("model.decoder.embed_positions", "max_position_embeddings+2", "d_model"),
        *own_norm("model.encoder.layernorm_embedding"),
        *own_norm("model.decoder.layernorm_embedding"),
    ),
    "extras": ("final_logits_bias", "classification_head.", "qa_outputs."),
    "attributes": {**BART_SIZES, "max_position_embeddings": 1024},
}
_COMPUTED_POSITIONS = ("encoder.embed_positions.weight", "decoder.embed_positions.weight")
"""Parameters to transformers, which computes them where a checkpoint lacks them, as the published checkpoints do."""

# 1910.13461
BART = _like_bart(
    "bart",
    "BartForConditionalGeneration",
    50265,
    classes=seq2seq_classes("Bart", more=BART_HEADS),
    buffers=("encoder.version", "decoder.version"),
    **_BART,
)
# mBART and mBART-50 (2001.08210): norms before the sublayers.
MBART = _like_bart(
    "mbart",
    "MBartForConditionalGeneration",
    50265,
    classes=seq2seq_classes("MBart", more=BART_HEADS),
    **{**_BART, "tensors": (*_BART["tensors"], *LAST_NORMS)},
)
# Also the dense NLLB-200 models. Sinusoidal positions, as in the two families below.
M2M_100 = _like_bart(
    "m2m_100",
    "M2M100ForConditionalGeneration",
    128112,
    classes=seq2seq_classes("M2M100"),
    tensors=LAST_NORMS,
    buffers=("embed_positions.weights",),
)
# 1912.08777
PEGASUS = _like_bart(
    "pegasus",
    "PegasusForConditionalGeneration",
    50265,
    classes=seq2seq_classes("Pegasus"),
    tensors=LAST_NORMS,
    extras=("final_logits_bias",),
    buffers=_COMPUTED_POSITIONS,
)
# OPUS-MT. Models with two vocabularies (`share_encoder_decoder_embeddings` false) are not declared.
MARIAN = _like_bart(
    "marian",
    "MarianMTModel",
    58101,
    classes=seq2seq_classes("Marian", "MTModel"),
    extras=("final_logits_bias",),
    buffers=_COMPUTED_POSITIONS,
)
