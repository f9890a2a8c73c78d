"""Written tables, read again."""

from __future__ import annotations

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
