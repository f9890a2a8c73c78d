"""heads.json: what is known of every attention head (1905.10650, 3 and 4.1)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prunecli.results.tables.rows import Row, Tables

VALUES = {"ablation": "without", "all-but-one": "only"}
"""Method -> the key, and the column, of its scores."""


def tables(payload: Mapping[str, Any]) -> Tables:
    """`heads`: a row for each head, of ablation and all-but-one for each metric; `best`: of each layer."""
    if payload["method"] == "gradient":
        return {"heads": list(_gradient(payload))}
    key = VALUES[payload["method"]]
    of = {payload["metric"]: payload, **payload.get("also", {})}
    rows = [row for metric, found in of.items() for row in _scores(payload["heads"], metric, found, key)]
    return {"heads": rows, "best": _best(payload, key)}


def _gradient(payload: Mapping[str, Any]) -> Iterator[Row]:
    """`importance` is the mean that the sum is of: over the examples, or over the tokens (eq. 2)."""
    tokens = payload.get("tokens", {})
    for name, heads in payload["heads"].items():
        count = tokens.get(name, payload["examples"])
        for head, total in zip(heads, payload["sum"][name], strict=True):
            yield {"attention": name, "head": head, "importance": total / count, "sum": total}


def _scores(heads: Mapping[str, list[int]], metric: str, found: Mapping[str, Any], key: str) -> Iterator[Row]:
    base, p_values = found["base"], found.get("p_value", {})
    for name, ids in heads.items():
        for index, head in enumerate(ids):
            value = found[key][name][index]
            yield {
                "attention": name,
                "head": head,
                "metric": metric,
                key: value,
                "change": value - base,
                "p_value": p_values[name][index] if name in p_values else None,
            }


def _best(payload: Mapping[str, Any], key: str) -> list[Row]:
    """all-but-one: the best single head of each layer; on other text, where that was measured."""
    found = payload.get("reported")
    rows = []
    for name, head in payload.get("best", {}).items():
        row = {"attention": name, "head": head, "metric": payload["metric"]}
        if found is None:
            own = {one["head"]: one for one in _scores({name: payload["heads"][name]}, "", payload, key)}[
                head
            ]
            value, base, p_value = own[key], payload["base"], own["p_value"]
        else:
            value, base, p_value = found[key][name], found["base"], found["p_value"][name]
        rows.append({**row, key: value, "change": value - base, "p_value": p_value})
    return rows
