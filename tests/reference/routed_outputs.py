"""Scores of routed experts from raw (indices, weights, norms), one token and one of its experts at a time.

Of every token: `indices` of the experts that it is routed to, in any order, `weights` that their outputs are multiplied
by, and `norms` of those outputs before that. 2212.09811, 4.1; 2510.13999, equations 9 and 13; 2606.15716, S(b, a, c).
"""

from collections.abc import Sequence
from math import exp

Token = tuple[Sequence[int], Sequence[float], Sequence[float]]
"""(indices, weights, norms), each `[top_k]`."""


def visits(tokens: Sequence[Token], expert: int) -> list[tuple[int, float, float]]:
    """(rank by weight, weight, norm) of the tokens that are routed to an expert."""
    found = []
    for indices, weights, norms in tokens:
        for place, index in enumerate(indices):
            if index == expert:
                rank = sum(weight > weights[place] for weight in weights)
                found.append((rank, weights[place], norms[place]))
    return found


def sums(tokens: Sequence[Token], experts: int) -> dict[str, list[float]]:
    """Sums of gates.json for one layer."""
    found = {}

    def put(name: str, value: float) -> None:
        found.setdefault(name, []).append(value)

    for expert in range(experts):
        own = visits(tokens, expert)
        put("top1", sum(rank == 0 for rank, _, _ in own))
        put("top2", sum(rank == 1 for rank, _, _ in own))
        put("gate_sum", sum(g for _, g, _ in own))
        put("conf1_sum", sum(g for rank, g, _ in own if rank == 0))
        put("conf2_sum", sum(g for rank, g, _ in own if rank == 1))
        put("routed", len(own))
        put("gate_sq_sum", sum(g * g for _, g, _ in own))
        put("norm_sum", sum(f for _, _, f in own))
        put("norm_sq_sum", sum(f * f for _, _, f in own))
        put("gate_norm_sum", sum(g * f for _, g, f in own))
        put("gate_norm_sq_sum", sum((g * f) ** 2 for _, g, f in own))
        put("norm_max", max([f for _, _, f in own], default=0.0))
    return found


def metric(name: str, tokens: Sequence[Token], experts: int) -> list[float]:
    """One metric of every expert."""
    values = []
    for expert in range(experts):
        own, n = visits(tokens, expert), len(tokens)
        if not own:
            values.append(0.0)
            continue
        first, second = ([g for rank, g, _ in own if rank == place] for place in (0, 1))
        top1, conf = len(first) / n, sum(first) / len(first) if first else 0.0
        both = sum(g * f for _, g, f in own)
        formulas = {
            "reap": both / len(own),
            "ean": sum(f for _, _, f in own),
            "frequency": float(len(own)),
            "seer": sum(g for _, g, _ in own),
            "man": sum(f for _, _, f in own) / len(own),
            "msan": sum(f * f for _, _, f in own) / len(own),
            "weighted-ean": both,
            "top1": top1,
            "top2": (len(first) + len(second)) / n,
            "load-balance": top1 * sum(g for _, g, _ in own) / n,
            "importance-vanilla": top1 * conf,
            "importance": top1 * exp(conf),
        }
        values.append(formulas[name])
    return values
