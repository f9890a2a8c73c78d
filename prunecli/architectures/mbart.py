"""mBART and mBART-50: BART with its norms before the sublayers, hence one more after each stack (2001.08210)."""

from __future__ import annotations

from prunecli.architectures.bart import BART
from prunecli.architectures.classes import bart_classes
from prunecli.architectures.common import BART_STACKS, BART_TIED
from prunecli.architectures.records import Architecture, TokenEmbedding, norm

MBART = Architecture(
    model_type="mbart",
    model_class="MBartForConditionalGeneration",
    auto_class="AutoModelForSeq2SeqLM",
    classes=bart_classes("MBart"),
    stacks=BART_STACKS,
    tensors=(
        *BART.tensors,
        *norm("model.encoder.layer_norm", "d_model"),
        *norm("model.decoder.layer_norm", "d_model"),
    ),
    tied=BART_TIED,
    extras=BART.extras,
    attributes=BART.attributes,
    embedding=TokenEmbedding("model.shared", "lm_head", ("MBartForConditionalGeneration",)),
)
