"""Section 4.1 of 2212.09811 from a list of routed tokens, one at a time."""

from collections.abc import Sequence
from math import exp


def ratios(gates: Sequence[Sequence[float]]) -> list[dict[str, float]]:
    """Per expert top1, top2, mean and conf; `gates` holds the softmax of every token over all experts."""
    experts = len(gates[0])
    found = []
    for expert in range(experts):
        first, second, total, when_first = 0, 0, 0.0, 0.0
        for gate in gates:
            order = sorted(range(experts), key=lambda e, gate=gate: (-gate[e], e))
            first += order[0] == expert
            second += order[1] == expert
            total += gate[expert]
            if order[0] == expert:
                when_first += gate[expert]
        sums = {"top1": first, "top2": first + second, "mean": total}
        means = {name: own / len(gates) for name, own in sums.items()}
        found.append({**means, "conf": when_first / first if first else 0.0})
    return found


def metric(name: str, gates: Sequence[Sequence[float]]) -> list[float]:
    """One metric of every expert."""
    formulas = {
        "top1": lambda e: e["top1"],
        "top2": lambda e: e["top2"],
        "load-balance": lambda e: e["top1"] * e["mean"],
        "importance-vanilla": lambda e: e["top1"] * e["conf"],
        "importance": lambda e: e["top1"] * exp(e["conf"]),
    }
    return [formulas[name](expert) for expert in ratios(gates)]


def sums(gates: Sequence[Sequence[float]]) -> dict[str, list[float]]:
    """Sums of gates.json for one layer, counted token by token."""
    experts = len(gates[0])
    names = ("top1", "top2", "gate_sum", "conf1_sum", "conf2_sum")
    found = {name: [0] * experts for name in names}
    for gate in gates:
        order = sorted(range(experts), key=lambda e, gate=gate: (-gate[e], e))
        found["top1"][order[0]] += 1
        found["top2"][order[1]] += 1
        found["conf1_sum"][order[0]] += gate[order[0]]
        found["conf2_sum"][order[1]] += gate[order[1]]
        for expert in range(experts):
            found["gate_sum"][expert] += gate[expert]
    return found
