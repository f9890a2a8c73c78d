"""Pegasus: BART's layers, norms before the sublayers and after each stack, sinusoidal positions (1912.08777)."""

from __future__ import annotations

from prunecli.architectures.classes import seq2seq_classes
from prunecli.architectures.common import BART_SIZES, BART_STACKS, BART_TIED, embeddings
from prunecli.architectures.records import Architecture, TokenEmbedding, norm

PEGASUS = Architecture(
    model_type="pegasus",
    model_class="PegasusForConditionalGeneration",
    auto_class="AutoModelForSeq2SeqLM",
    classes=seq2seq_classes("Pegasus"),
    stacks=BART_STACKS,
    tensors=(
        embeddings("model.shared", "vocab_size", "d_model"),
        *norm("model.encoder.layer_norm", "d_model"),
        *norm("model.decoder.layer_norm", "d_model"),
    ),
    tied=BART_TIED,
    extras=("final_logits_bias",),
    # Frozen parameters to transformers, which computes them where a checkpoint lacks them, as the published ones do.
    buffers=("encoder.embed_positions.weight", "decoder.embed_positions.weight"),
    attributes={**BART_SIZES, "vocab_size": 50265},
    embedding=TokenEmbedding("model.shared", "lm_head", ("PegasusForConditionalGeneration",)),
)
