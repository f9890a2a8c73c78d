"""What no class of transformers tells, as records: NLLB-MoE, and the experts of a few mixtures."""

from prunecli.architectures.mixtures import EXPERTS_ONLY
from prunecli.architectures.nllb_moe import NLLB_MOE
from prunecli.architectures.records import Architecture

OLDER_TYPES = {"nllb_moe": "nllb-moe"}
"""What older revisions of published models call a family -> what it is called now, by transformers too."""

REDUCED_PREFIX = "prunecli-"
"""Before the model type of a result that the stock class cannot hold, so that it must not open it."""

__all__ = ["EXPERTS_ONLY", "NLLB_MOE", "OLDER_TYPES", "REDUCED_PREFIX", "Architecture"]
