"""Gate sums of 2212.09811, 4.1, from a plain list of what happened to each token."""

from __future__ import annotations

import numpy as np


def sums(gates: list[np.ndarray]) -> dict[str, np.ndarray | int]:
    """Sums of `gates.json` for one layer: `gates` has one `[experts]` array per real token."""
    experts = len(gates[0])
    found: dict[str, np.ndarray | int] = {
        name: np.zeros(experts) for name in ("top1", "top2", "gate_sum", "conf1_sum", "conf2_sum")
    }
    for gate in gates:
        first, second = sorted(range(experts), key=lambda e: (-gate[e], e))[:2]
        found["top1"][first] += 1  # type: ignore[index]
        found["conf1_sum"][first] += gate[first]  # type: ignore[index]
        found["top2"][second] += 1  # type: ignore[index]
        found["conf2_sum"][second] += gate[second]  # type: ignore[index]
        found["gate_sum"] += gate
    found["tokens"] = len(gates)
    return found
