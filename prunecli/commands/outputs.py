"""What commands that measure check of their outputs before the work begins."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from prunecli.errors import UsageError
from prunecli.tensors.documents import refuse_unwritable

if TYPE_CHECKING:
    from prunecli.results.tabled import Tabled


def check_outputs(output: Path, plot: Path | None = None, table: Path | None = None, *, force: bool) -> None:
    """Refuse what could not be written in the end.

    Raises:
        OutputError: one of them exists and `force` is not given, is a directory, or lies in none.
        UsageError, PruneError: as `check_plot` and `check_table`; the table has the name of the output.
    """
    refuse_unwritable(output, force=force)
    if plot is not None:
        check_plot(plot, force=force)
    check_table(table, force=force)
    if table is not None and table.absolute() == output.absolute():
        raise UsageError(f"--table {table}: the result is written there", "Choose another name.")


def check_table(table: Path | None, *, force: bool) -> None:
    """Refuse a table that could not be written in the end.

    Raises:
        OutputError, UsageError: as `refuse_table`.
    """
    if table is not None:
        from prunecli.results.tabled import refuse_table

        refuse_table(table, force=force)


def write_table(path: Path | None, result: Tabled, *, force: bool, leave_out: Sequence[str] = ()) -> None:
    """Write the tables of a result where --table asks for them.

    Args:
        leave_out: names of tables that the terminal does not show.

    Raises:
        OutputError, UsageError: as `refuse_table`.
    """
    if path is None:
        return
    from prunecli.results.tabled import write_tables

    tables = {name: rows for name, rows in result.tables().items() if name not in leave_out}
    write_tables(path, tables, force=force)


def written(*paths: Path | None) -> str:
    """The line that says what was written: "Written to a, b and c."."""
    names = [str(path) for path in paths if path is not None]
    return f"Written to {' and '.join(filter(None, [', '.join(names[:-1]), names[-1]]))}."


def check_plot(plot: Path, *, force: bool) -> None:
    """Refuse a picture that could not be written in the end.

    Raises:
        OutputError: it exists and `force` is not given, is a directory, or lies in none.
        UsageError: it is no PNG file.
        PruneError: there is no matplotlib.
    """
    from prunecli.analysis.plots import require_matplotlib

    refuse_unwritable(plot, force=force)
    if plot.suffix.lower() != ".png":
        raise UsageError(f"--plot {plot}: only PNG is drawn", "Choose a name that ends in .png.")
    require_matplotlib()
