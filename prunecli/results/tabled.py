"""Results as tables of plain records, as pandas frames, and as CSV, Markdown and LaTeX.

A table is a list of rows; a row maps a column's name, with its unit where it has one, to a value of the file. pandas is
imported only when it is called.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from prunecli.errors import UsageError
from prunecli.tensors.documents import refuse_unwritable
from prunecli.tensors.transaction import new_file

if TYPE_CHECKING:
    import pandas as pd

Row: TypeAlias = dict[str, Any]
"""Column's name -> value."""
Tables: TypeAlias = dict[str, list[Row]]
"""Table's name -> its rows; a row lacks the columns that do not concern it."""


def picked(values: Mapping[str, Any], names: Iterable[str]) -> Row:
    """Select the values that are present."""
    return {name: values[name] for name in names if name in values}


def scalars(values: Mapping[str, Any]) -> Row:
    """The values that fill one cell: no lists, no objects."""
    return {name: value for name, value in values.items() if not isinstance(value, (Mapping, list, tuple))}


def cells(values: Mapping[str, Any]) -> Row:
    """The values, with the length of a list in its place."""
    return {name: len(value) if isinstance(value, (list, tuple)) else value for name, value in values.items()}


def frame(rows: Sequence[Row]) -> pd.DataFrame:
    """A row for each of `rows`, a column for each name, in the order in which names come up."""
    import pandas as pd

    made = pd.DataFrame(rows, dtype=object)
    made = made.where(made.notna(), None)
    return made.astype({name: _dtype(made[name]) for name in made})


def stacked(tables: Tables) -> pd.DataFrame:
    """All tables below one another; the first column, `table`, has their names."""
    return frame([{"table": name, **row} for name, rows in tables.items() for row in rows])


def _dtype(values: pd.Series) -> str:
    """Integers stay integers where some are missing."""
    kinds = {type(value) for value in values if value is not None}
    if kinds == {int}:
        return "Int64"
    if kinds == {bool}:
        return "boolean"
    return "float64" if kinds and kinds <= {int, float} else "object"


def refuse_table(path: Path, *, force: bool) -> None:
    """Refuse a table that could not be written in the end.

    Raises:
        UsageError: its ending is not that of a form.
        OutputError: it exists and `force` is not given, is a directory, or lies in none.
    """
    if path.suffix.lower() not in (".csv", ".md", ".tex"):
        raise UsageError(
            f"`table={path}`: tables are written as CSV, Markdown or LaTeX",
            "Choose a name that ends in .csv, .md or .tex.",
        )
    refuse_unwritable(path, force=force)


def write_tables(path: Path, tables: Tables, *, force: bool = False) -> None:
    """Write tables in the form that the name's ending says, whole or not at all.

    CSV is one table, whose first column, `table`, has the name of each row's; Markdown has a heading, LaTeX a comment
    before each.

    Raises:
        UsageError, OutputError: as `refuse_table`.
    """
    refuse_table(path, force=force)
    form = path.suffix.lower()
    if form == ".csv":
        text = str(stacked(tables).to_csv(index=False, lineterminator="\n"))
    else:
        head, one = ("## {}\n", _markdown) if form == ".md" else ("% {}", _latex)
        text = "\n".join(f"{head.format(name)}\n{one(frame(rows))}" for name, rows in tables.items())
    with new_file(path) as partial:
        partial.write_text(text, encoding="utf-8", newline="")


def _markdown(made: pd.DataFrame) -> str:
    """pandas' own needs another package."""
    rule = ["---" if made[name].dtype == object else "---:" for name in made]
    cells = [made.columns, *_texts(made).itertuples(index=False)]
    head, *rows = [[" ".join(text.replace("|", "\\|").split()) for text in row] for row in cells]
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, rule, *rows))


def _latex(made: pd.DataFrame) -> str:
    """For a document that uses booktabs."""
    numbers = "".join("l" if made[name].dtype == object else "r" for name in made)
    return str(_texts(made).to_latex(index=False, escape=True, column_format=numbers))


def _texts(made: pd.DataFrame) -> pd.DataFrame:
    """The cells as text, "" where a value is missing."""
    return made.astype(object).where(made.notna(), "").map(str)
