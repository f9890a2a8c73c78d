"""Words that options about heads, hidden units and layers take. `--help` imports them without what computes them."""

from __future__ import annotations

from typing import Literal

HeadMetric = Literal["importance", "random"]
"""What heads are ranked by."""
Normalize = Literal["per-layer", "none"]
"""How importances of heads are compared between layers."""
EffectMetric = Literal["chrf++", "bleu", "loss", "accuracy", "cosine"]
"""The score that changes when a head is masked."""
UnitMetric = Literal["activation", "activation-norm", "norms", "random"]
"""What hidden units are ranked by."""
LayerMetric = Literal["cosine", "cka", "perplexity", "embedding", "random", "last"]
"""What layers are ranked by."""
