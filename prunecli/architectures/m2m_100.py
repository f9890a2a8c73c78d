"""M2M-100 and the dense NLLB-200 models: BART's layers, sinusoidal positions, a norm after each stack."""

from __future__ import annotations

from prunecli.architectures.classes import seq2seq_classes
from prunecli.architectures.common import BART_SIZES, BART_STACKS, BART_TIED, embeddings
from prunecli.architectures.records import Architecture, TokenEmbedding, norm

M2M_100 = Architecture(
    model_type="m2m_100",
    model_class="M2M100ForConditionalGeneration",
    auto_class="AutoModelForSeq2SeqLM",
    classes=seq2seq_classes("M2M100"),
    stacks=BART_STACKS,
    tensors=(
        embeddings("model.shared", "vocab_size", "d_model"),
        *norm("model.encoder.layer_norm", "d_model"),
        *norm("model.decoder.layer_norm", "d_model"),
    ),
    tied=BART_TIED,
    buffers=("embed_positions.weights",),
    attributes={**BART_SIZES, "vocab_size": 128112},
    embedding=TokenEmbedding("model.shared", "lm_head", ("M2M100ForConditionalGeneration",)),
)
