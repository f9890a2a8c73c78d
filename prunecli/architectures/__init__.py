"""The model families, declared as records. To add one: write its record beside its kin, list it here."""

from __future__ import annotations

from prunecli.architectures.bart import BART, M2M_100, MARIAN, MBART, PEGASUS
from prunecli.architectures.bert import BERT, DISTILBERT, ROBERTA, XLM_ROBERTA
from prunecli.architectures.gpt2 import GPT2
from prunecli.architectures.llama import GEMMA2, GEMMA3, LLAMA, MISTRAL, PHI3, QWEN2, QWEN3, SMOLLM3
from prunecli.architectures.mixtures import EXPERTS_ONLY
from prunecli.architectures.nllb_moe import NLLB_MOE
from prunecli.architectures.opt import OPT
from prunecli.architectures.records import Architecture
from prunecli.architectures.t5 import MT5, T5

_SEQ2SEQ = (NLLB_MOE, M2M_100, MARIAN, PEGASUS, BART, MBART, T5, MT5)
_ENCODERS = (BERT, ROBERTA, XLM_ROBERTA, DISTILBERT)
_DECODERS = (GPT2, OPT, LLAMA, MISTRAL, QWEN2, QWEN3, SMOLLM3, GEMMA2, GEMMA3, PHI3)

FAMILIES = {family.model_type: family for family in (*_SEQ2SEQ, *_ENCODERS, *_DECODERS)}

OLDER_TYPES = {"nllb_moe": "nllb-moe"}
"""What older revisions of published models call a family -> what it is called now, by transformers too."""

REDUCED_PREFIX = "prunecli-"
"""Before the model type of a result that the stock class cannot hold, so that it must not open it."""

__all__ = ["EXPERTS_ONLY", "FAMILIES", "OLDER_TYPES", "REDUCED_PREFIX", "Architecture"]
