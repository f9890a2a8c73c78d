"""XLM-RoBERTa: RoBERTa's layout, module for module, over the vocabulary of a hundred languages (1911.02116)."""

from __future__ import annotations

from dataclasses import replace

from prunecli.architectures.classes import roberta_classes
from prunecli.architectures.common import BERT_SIZES
from prunecli.architectures.records import TokenEmbedding
from prunecli.architectures.roberta import ROBERTA

XLM_ROBERTA = replace(
    ROBERTA,
    model_type="xlm-roberta",
    model_class="XLMRobertaForMaskedLM",
    classes=roberta_classes("XLMRoberta"),
    attributes={**BERT_SIZES, "vocab_size": 30522},
    embedding=TokenEmbedding(
        "roberta.embeddings.word_embeddings",
        "lm_head.decoder",
        ("XLMRobertaForMaskedLM", "XLMRobertaForCausalLM"),
        apart=True,
    ),
)
