"""DistilBERT, with any of its task heads: BERT's layers under names of their own, half as many (1910.01108)."""

from __future__ import annotations

from prunecli.architectures.classes import DISTILBERT_CLASSES
from prunecli.architectures.common import BERT_RENAMED, embeddings
from prunecli.architectures.records import (
    Architecture,
    Attention,
    FeedForward,
    Stack,
    TokenEmbedding,
    linear,
    norm,
)

_ATTENTION = Attention(
    name="attention",
    kind="self",
    heads="n_heads",
    tensors=(
        *linear("attention.q_lin", "dim", "dim", "attention", heads=0),
        *linear("attention.k_lin", "dim", "dim", "attention", heads=0),
        *linear("attention.v_lin", "dim", "dim", "attention", heads=0),
        *linear("attention.out_lin", "dim", "dim", "attention", heads=1),
    ),
    output="attention.out_lin",
    norms=("sa_layer_norm",),
)

DISTILBERT = Architecture(
    model_type="distilbert",
    model_class="DistilBertForMaskedLM",
    auto_class="AutoModelForMaskedLM",
    classes=DISTILBERT_CLASSES,
    stacks=(
        Stack(
            side="encoder",
            layers="distilbert.transformer.layer.{layer}",
            depth="n_layers",
            attentions=(_ATTENTION,),
            ffn=FeedForward(
                name="ffn",
                width="hidden_dim",
                norms=("output_layer_norm",),
                tensors=(
                    *linear("lin1", "dim", "hidden_dim", "ffn", hidden=0),
                    *linear("lin2", "hidden_dim", "dim", "ffn", hidden=1),
                ),
            ),
            norms=(*norm("sa_layer_norm", "dim"), *norm("output_layer_norm", "dim")),
        ),
    ),
    tensors=(
        embeddings("distilbert.embeddings.word_embeddings", "vocab_size", "dim"),
        embeddings("distilbert.embeddings.position_embeddings", "max_position_embeddings", "dim"),
        *norm("distilbert.embeddings.LayerNorm", "dim"),
    ),
    tied={"vocab_projector.weight": "distilbert.embeddings.word_embeddings.weight"},
    loose=("vocab_projector.weight",),
    extras=(
        "vocab_transform.",
        "vocab_layer_norm.",
        "vocab_projector.",
        "pre_classifier.",
        "classifier.",
        "qa_outputs.",
    ),
    renamed=BERT_RENAMED,
    buffers=("embeddings.position_ids",),
    attributes={
        "vocab_size": 30522,
        "max_position_embeddings": 512,
        "n_layers": 6,
        "n_heads": 12,
        "dim": 768,
        "hidden_dim": 3072,
        "tie_word_embeddings": True,
    },
    embedding=TokenEmbedding(
        "distilbert.embeddings.word_embeddings", "vocab_projector", ("DistilBertForMaskedLM",), apart=True
    ),
)
