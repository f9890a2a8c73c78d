"""The words of options about experts, by themselves: `--help` says them without what computes them."""

from __future__ import annotations

from typing import Literal

MetricName = Literal[
    "importance",
    "importance-vanilla",
    "top1",
    "top2",
    "load-balance",
    "reap",
    "ean",
    "frequency",
    "seer",
    "man",
    "msan",
    "weighted-ean",
    "aimer",
    "random",
]
"""Of `metrics.METRICS` and `WITHOUT_STATISTICS`."""
Strategy = Literal["per-layer", "global-threshold", "side-threshold"]
"""How many experts each layer keeps."""
Granularity = Literal["language", "pair", "global"]
"""Whose experts are chosen together."""
Predicting = Literal["prune", "drop"]
"""What happens to the layers that predict further tokens."""
