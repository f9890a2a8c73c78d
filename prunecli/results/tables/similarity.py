"""similarity.json: components that correspond (or follow on one another), means by side, and all the matrices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prunecli.results.schemas import ends_of
from prunecli.results.tables.rows import Row, Tables, picked


def tables(payload: Mapping[str, Any]) -> Tables:
    """`corresponding` or `successive`, `mean`, and `matrices`: a row for each cell and measure."""
    key = "corresponding" if "corresponding" in payload else "successive"
    known = {component["name"]: component for component in payload["components"]["first"]}
    pairs = [
        {**picked(known[row["first"]], ("side", "layer", "kind")), **row} for row in payload.get(key, ())
    ]
    mean = [{"side": side, **values} for side, values in payload["mean"].items()]
    return {key: pairs, "mean": mean, "matrices": _matrices(payload)}


def _matrices(payload: Mapping[str, Any]) -> list[Row]:
    rows: list[Row] = []
    for measure, matrices in payload["matrices"].items():
        for name, matrix in matrices.items():
            ends = [[one["name"] for one in payload["components"][key]] for key in ends_of(name)]
            rows += [
                {"measure": measure, "matrix": name, "row": row, "column": column, "similarity": value}
                for row, values in zip(ends[0], matrix, strict=True)
                for column, value in zip(ends[1], values, strict=True)
            ]
    return rows
