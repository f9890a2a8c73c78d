"""What the formats' tables are made of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

Row: TypeAlias = dict[str, Any]
"""Column's name -> value."""
Tables: TypeAlias = dict[str, list[Row]]
"""Table's name -> its rows; a row lacks the columns that do not concern it."""


def picked(values: Mapping[str, Any], names: Iterable[str]) -> Row:
    """Those of `values` that are there."""
    return {name: values[name] for name in names if name in values}


def scalars(values: Mapping[str, Any]) -> Row:
    """The values that fill one cell: no lists, no objects."""
    return {name: value for name, value in values.items() if not isinstance(value, (Mapping, list, tuple))}


def spread(name: str, values: Mapping[str, Any]) -> Row:
    """A mean and its standard deviation as two columns."""
    return {f"{name}_mean": values["mean"], f"{name}_std": values.get("std")}
