"""The words of options about hidden units, by themselves: `--help` says them without what computes them."""

from __future__ import annotations

from typing import Literal

UnitMetric = Literal["activation", "activation-norm", "norms", "random"]
"""What a hidden unit is worth."""
