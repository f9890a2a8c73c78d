"""gates.json: the sums of every expert (2212.09811, 4.1)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prunecli.results.tables.rows import Tables

SUMS = ("top1", "top2", "gate_sum", "conf1_sum", "conf2_sum")


def tables(payload: Mapping[str, Any]) -> Tables:
    """`gates`: a row for each entry, layer and expert; `tokens` are those of the layer."""
    return {
        "gates": [
            {
                "pair": pair,
                "layer": layer,
                "expert": expert,
                "tokens": sums["tokens"][index],
                **{name: sums[name][index][expert] for name in SUMS},
            }
            for pair, sums in payload["entries"].items()
            for index, layer in enumerate(payload["layers"])
            for expert in range(payload["num_experts"])
        ]
    }
