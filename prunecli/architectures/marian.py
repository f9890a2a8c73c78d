"""Marian (OPUS-MT): BART's layers, sinusoidal positions, no norm outside of the layers.

Encoder and decoder share their embeddings; models with two vocabularies (`share_encoder_decoder_embeddings` false)
are not declared.
"""

from __future__ import annotations

from prunecli.architectures.classes import seq2seq_classes
from prunecli.architectures.common import BART_SIZES, BART_STACKS, BART_TIED, embeddings
from prunecli.architectures.records import Architecture, TokenEmbedding

MARIAN = Architecture(
    model_type="marian",
    model_class="MarianMTModel",
    auto_class="AutoModelForSeq2SeqLM",
    classes=seq2seq_classes("Marian", "MTModel"),
    stacks=BART_STACKS,
    tensors=(embeddings("model.shared", "vocab_size", "d_model"),),
    tied=BART_TIED,
    extras=("final_logits_bias",),
    # Parameters to transformers, which computes them all the same and does not save them.
    buffers=("encoder.embed_positions.weight", "decoder.embed_positions.weight"),
    attributes={**BART_SIZES, "vocab_size": 58101},
    embedding=TokenEmbedding("model.shared", "lm_head", ("MarianMTModel",)),
)
