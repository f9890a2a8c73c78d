"""Written tables, read again; documents with one value changed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd


def rows(path: Path | str, table: str) -> list[dict[str, Any]]:
    """The rows of one table of a CSV file, every number as it was written; empty cells are left out."""
    found = pd.read_csv(path, float_precision="round_trip")
    own = found[found["table"] == table].drop(columns="table")
    return [
        {name: value for name, value in row.items() if not pd.isna(value)} for row in own.to_dict("records")
    ]


def setting(*keys: str | int, to: Any) -> Callable[[Any], object]:
    """Changes one value of a JSON document, at the end of the keys."""

    def spoil(payload: Any) -> None:
        for key in keys[:-1]:
            payload = payload[key]
        payload[keys[-1]] = to

    return spoil
