"""What a result file tells as tables of plain records: one module for each format, no pandas, nothing rounded.

A table is a list of rows; a row maps a column's name, with its unit where it has one, to a value of the file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from prunecli.results.tables import (
    evaluation,
    finetune,
    gates,
    heads,
    inspection,
    languages,
    latency,
    similarity,
)
from prunecli.results.tables.rows import Row, Tables

TABLES: Mapping[str, Callable[[Mapping[str, Any]], Tables]] = {
    "prunecli.evaluation/1": evaluation.tables,
    "prunecli.finetune/1": finetune.tables,
    "prunecli.gates/1": gates.tables,
    "prunecli.heads/1": heads.tables,
    "prunecli.inspect/1": inspection.tables,
    "prunecli.languages/1": languages.tables,
    "prunecli.latency/1": latency.tables,
    "prunecli.similarity/1": similarity.tables,
}
"""Format -> what makes its tables of a payload."""


def tables_of(payload: Mapping[str, Any]) -> Tables:
    """Name -> rows of each table of a payload; those without rows are left out.

    Raises:
        KeyError: its format has no tables.
    """
    return {name: rows for name, rows in TABLES[payload["format"]](payload).items() if rows}


__all__ = ["TABLES", "Row", "Tables", "tables_of"]
