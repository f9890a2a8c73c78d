"""The words of options about FFNs, by themselves: `--help` says them without what computes them."""

from __future__ import annotations

from typing import Literal

from prunecli.methods.sharing import Init

FfnInit = Literal[Init, "concat"]
"""How a shared FFN is made of several."""
KeepUnits = Literal["norms", "activations"]
"""Which hidden units stay where a shared FFN gets narrower."""
UnitScore = Literal["activation", "activation-norm", "norms", "random"]
"""What a hidden unit is worth."""
