"""BERT, with any of its task heads (1810.04805)."""

from __future__ import annotations

from prunecli.architectures.classes import BERT_CLASSES
from prunecli.architectures.common import (
    BERT_BUFFERS,
    BERT_RENAMED,
    BERT_SIZES,
    bert_embeddings,
    bert_stack,
)
from prunecli.architectures.records import Architecture, TokenEmbedding

BERT = Architecture(
    model_type="bert",
    model_class="BertForMaskedLM",
    auto_class="AutoModelForMaskedLM",
    classes=BERT_CLASSES,
    pooler="bert.pooler.",
    stacks=(bert_stack("bert"),),
    tensors=bert_embeddings("bert"),
    tied={
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
    loose=("cls.predictions.decoder.weight", "cls.predictions.decoder.bias"),
    extras=("bert.pooler.", "cls.", "classifier.", "qa_outputs."),
    renamed=BERT_RENAMED,
    buffers=BERT_BUFFERS,
    attributes={**BERT_SIZES, "vocab_size": 30522},
    embedding=TokenEmbedding(
        "bert.embeddings.word_embeddings",
        "cls.predictions.decoder",
        ("BertForMaskedLM", "BertForPreTraining", "BertLMHeadModel"),
        apart=True,
    ),
)
