"""The words of options about layers, by themselves: `--help` says them without what computes them."""

from __future__ import annotations

from typing import Literal

LayerMetric = Literal["cosine", "cka", "perplexity", "embedding", "random", "last"]
"""What a layer is worth."""
