"""BART: learned positions, from the third row of their table on, and a norm after the embeddings (1910.13461)."""

from __future__ import annotations

from prunecli.architectures.classes import bart_classes
from prunecli.architectures.common import BART_SIZES, BART_STACKS, BART_TIED, embeddings
from prunecli.architectures.records import Architecture, TokenEmbedding, norm

BART = Architecture(
    model_type="bart",
    model_class="BartForConditionalGeneration",
    auto_class="AutoModelForSeq2SeqLM",
    classes=bart_classes("Bart"),
    stacks=BART_STACKS,
    tensors=(
        embeddings("model.shared", "vocab_size", "d_model"),
        embeddings("model.encoder.embed_positions", "max_position_embeddings+2", "d_model"),
        embeddings("model.decoder.embed_positions", "max_position_embeddings+2", "d_model"),
        *norm("model.encoder.layernorm_embedding", "d_model"),
        *norm("model.decoder.layernorm_embedding", "d_model"),
    ),
    tied=BART_TIED,
    extras=("final_logits_bias", "classification_head.", "qa_outputs."),
    buffers=("encoder.version", "decoder.version"),
    attributes={**BART_SIZES, "vocab_size": 50265, "max_position_embeddings": 1024},
    embedding=TokenEmbedding("model.shared", "lm_head", ("BartForConditionalGeneration",)),
)
