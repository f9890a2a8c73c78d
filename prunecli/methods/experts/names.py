"""Values of the options of `prune-experts`, apart from the code that uses them, so that `--help` is fast."""

from __future__ import annotations

from typing import Literal

MIN_TOKENS = 100
"""Fewer tokens are too few to judge an expert by. In a small Qwen3-MoE (6 layers of 32 experts) g‖f‖ spreads over an
expert's tokens by its mean, and neighbours in the order by REAP differ by 7 to 8 %: judged by 10 successive tokens of
its own, an expert is 22 to 29 % off and moves by 2 to 4 places of 32, by 100 of them 7 to 13 % and 1 to 2 places."""
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
