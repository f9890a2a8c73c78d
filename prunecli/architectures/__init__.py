"""The model families, each declared in a short file. To add one: write its record, list it here."""

from __future__ import annotations

from prunecli.architectures.bart import BART
from prunecli.architectures.bert import BERT
from prunecli.architectures.distilbert import DISTILBERT
from prunecli.architectures.gemma2 import GEMMA2
from prunecli.architectures.gemma3 import GEMMA3
from prunecli.architectures.gpt2 import GPT2
from prunecli.architectures.llama import LLAMA
from prunecli.architectures.m2m_100 import M2M_100
from prunecli.architectures.marian import MARIAN
from prunecli.architectures.mbart import MBART
from prunecli.architectures.mistral import MISTRAL
from prunecli.architectures.mixtral import MIXTRAL
from prunecli.architectures.mixtures import EXPERTS_ONLY
from prunecli.architectures.mt5 import MT5
from prunecli.architectures.nllb_moe import NLLB_MOE
from prunecli.architectures.olmoe import OLMOE
from prunecli.architectures.opt import OPT
from prunecli.architectures.pegasus import PEGASUS
from prunecli.architectures.phi3 import PHI3
from prunecli.architectures.qwen2 import QWEN2
from prunecli.architectures.qwen3 import QWEN3
from prunecli.architectures.qwen3_moe import QWEN3_MOE
from prunecli.architectures.records import Architecture
from prunecli.architectures.roberta import ROBERTA
from prunecli.architectures.smollm3 import SMOLLM3
from prunecli.architectures.t5 import T5
from prunecli.architectures.xlm_roberta import XLM_ROBERTA

_SEQ2SEQ = (NLLB_MOE, M2M_100, MARIAN, PEGASUS, BART, MBART, T5, MT5)
_ENCODERS = (BERT, ROBERTA, XLM_ROBERTA, DISTILBERT)
_DECODERS = (GPT2, OPT, LLAMA, MISTRAL, QWEN2, QWEN3, SMOLLM3, GEMMA2, GEMMA3, PHI3)

FAMILIES: dict[str, Architecture] = {
    family.model_type: family for family in (*_SEQ2SEQ, *_ENCODERS, *_DECODERS)
}

WHOLE_MIXTURES: dict[str, Architecture] = {
    family.model_type: family for family in (MIXTRAL, QWEN3_MOE, OLMOE)
}
"""Those of `EXPERTS_ONLY` of which all parts are declared; their stock classes run them all the same."""

OLDER_TYPES = {"nllb_moe": "nllb-moe"}
"""What older revisions of published models call a family -> what it is called now, by transformers too."""

REDUCED_PREFIX = "prunecli-"
"""Before the model type of a result that the stock class cannot hold, so that it must not open it."""

__all__ = ["EXPERTS_ONLY", "FAMILIES", "OLDER_TYPES", "REDUCED_PREFIX", "WHOLE_MIXTURES", "Architecture"]
