"""The names of metrics of experts, by themselves: `--help` says them without what computes them."""

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
