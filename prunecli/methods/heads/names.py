"""The words of options about heads, by themselves: `--help` says them without what computes them."""

from __future__ import annotations

from typing import Literal

HeadMetric = Literal["importance", "random"]
"""What heads are pruned by."""
Normalize = Literal["per-layer", "none"]
"""How their importances are compared between layers."""
EffectMetric = Literal["chrf++", "bleu", "loss", "accuracy", "cosine"]
"""What a head's ablation changes."""
