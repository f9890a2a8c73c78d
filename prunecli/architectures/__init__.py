"""The model families, each declared in a short file. To add one: write its record, list it here."""

from __future__ import annotations

from prunecli.architectures.nllb_moe import NLLB_MOE
from prunecli.architectures.records import Architecture

FAMILIES: dict[str, Architecture] = {family.model_type: family for family in (NLLB_MOE,)}

REDUCED_PREFIX = "prunecli-"
"""Before the model type of a result that the stock class cannot hold, so that it must not open it."""

__all__ = ["FAMILIES", "REDUCED_PREFIX", "Architecture"]
