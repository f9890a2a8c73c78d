"""What `inspect --json` prints: parameters by part, experts, heads, FFNs, and what fits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prunecli.results.tables.rows import Row, Tables, picked

FFN = ("name", "side", "layer", "width", "shared_with", "removed", "sparse")
WAY = ("device", "dtype", "ratio", "weight_bytes", "needed_bytes", "fits", "state_tokens")


def tables(payload: Mapping[str, Any]) -> Tables:
    """`parameters`, `experts`, `heads`, `ffns`, `modules` (of a family that is not supported), `fit`."""
    total = payload["total"]
    amounts = {**payload["parts"], "total": total}
    modules = (payload.get("surmise") or {}).get("modules", {})
    return {
        "parameters": [
            {"part": part, **amount, "share_of_bytes": amount["bytes"] / max(1, total["bytes"])}
            for part, amount in amounts.items()
        ],
        "experts": [_counted(layer, "experts") for layer in payload["layers"]],
        "heads": [_counted(layer, "heads") for layer in payload["attentions"]],
        "ffns": [picked(layer, FFN) for layer in payload["ffns"]],
        "modules": [{"module": name, "tensors": len(held)} for name, held in modules.items()],
        "fit": _fit(payload["fit"]) if "fit" in payload else [],
    }


def _counted(layer: Mapping[str, Any], held: str) -> Row:
    return {
        **picked(layer, ("name", "kind")),
        held: len(layer[held]),
        f"original_{held}": layer[f"original_{held}"],
    }


def _fit(fit: Mapping[str, Any]) -> list[Row]:
    ways = {"whole": fit["whole"], "pruned": fit["pruned"], "layer by layer": fit["by_layer"]["ways"]}
    return [
        {"way": way, **picked(found, WAY), "besides_bytes": found["needed_bytes"] - found["weight_bytes"]}
        for way, all_found in ways.items()
        for found in all_found
    ]
