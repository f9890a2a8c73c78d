"""mT5: T5 1.1 with a vocabulary of 250,000, most of the model's parameters (2010.11934)."""

from __future__ import annotations

from dataclasses import replace

from prunecli.architectures.classes import seq2seq_classes
from prunecli.architectures.records import TokenEmbedding
from prunecli.architectures.t5 import T5

MT5 = replace(
    T5,
    model_type="mt5",
    model_class="MT5ForConditionalGeneration",
    classes=seq2seq_classes("MT5"),
    attributes={
        **T5.attributes,
        "vocab_size": 250112,
        "d_ff": 1024,
        "num_layers": 8,
        "num_decoder_layers": "num_layers",
        "num_heads": 6,
        "feed_forward_proj": "gated-gelu",
    },
    embedding=TokenEmbedding("shared", "lm_head", ("MT5ForConditionalGeneration",)),
)
