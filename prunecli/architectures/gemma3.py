"""Gemma 3, the text models: Gemma 2's layout with norms of queries and keys, no capping (2503.19786)."""

from __future__ import annotations

from dataclasses import replace

from prunecli.architectures.classes import GEMMA3_CLASSES
from prunecli.architectures.gemma2 import GEMMA2, gemma_stack
from prunecli.architectures.records import TokenEmbedding

GEMMA3 = replace(
    GEMMA2,
    model_type="gemma3_text",
    model_class="Gemma3ForCausalLM",
    classes=GEMMA3_CLASSES,
    stacks=(gemma_stack(("q_norm", "k_norm")),),
    # As the text part of an image model is saved, by transformers 4 and 5.
    prefixes={
        "language_model.model.": "model.",
        "language_model.lm_head.": "lm_head.",
        "model.language_model.": "model.",
    },
    buffers=(
        "embed_tokens.embed_scale",
        *(
            f"rotary_emb.{kind}_{name}"
            for kind in ("full_attention", "sliding_attention")
            for name in ("inv_freq", "original_inv_freq")
        ),
    ),
    attributes={**GEMMA2.attributes, "vocab_size": 262208},
    embedding=TokenEmbedding("model.embed_tokens", "lm_head", ("Gemma3ForCausalLM",), apart=True),
    window_period=6,
)
