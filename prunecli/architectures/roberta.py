"""RoBERTa, with any of its task heads: BERT's layers, positions from `pad_token_id + 1` on (1907.11692)."""

from __future__ import annotations

from prunecli.architectures.classes import roberta_classes
from prunecli.architectures.common import (
    BERT_BUFFERS,
    BERT_RENAMED,
    BERT_SIZES,
    bert_embeddings,
    bert_stack,
)
from prunecli.architectures.records import Architecture, TokenEmbedding

ROBERTA = Architecture(
    model_type="roberta",
    model_class="RobertaForMaskedLM",
    auto_class="AutoModelForMaskedLM",
    classes=roberta_classes("Roberta"),
    pooler="roberta.pooler.",
    stacks=(bert_stack("roberta"),),
    tensors=bert_embeddings("roberta"),
    tied={
        "lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight",
        "lm_head.decoder.bias": "lm_head.bias",
    },
    loose=("lm_head.decoder.weight", "lm_head.decoder.bias"),
    extras=("roberta.pooler.", "lm_head.", "classifier.", "qa_outputs."),
    renamed=BERT_RENAMED,
    buffers=BERT_BUFFERS,
    attributes={**BERT_SIZES, "vocab_size": 50265},
    embedding=TokenEmbedding(
        "roberta.embeddings.word_embeddings",
        "lm_head.decoder",
        ("RobertaForMaskedLM", "RobertaForCausalLM"),
        apart=True,
    ),
)
