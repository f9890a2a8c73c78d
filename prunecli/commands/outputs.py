"""The outputs of commands that measure: their options, what is checked before the work begins, what is said."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prunecli.commands import console
from prunecli.errors import UsageError
from prunecli.options import Options, option
from prunecli.tensors.documents import refuse_unwritable, write_json

if TYPE_CHECKING:
    from prunecli.results.document import Document


def result_option(default: str, help: str = "File of the result.") -> Any:  # noqa: A002
    """Return the field `output` of a command that measures."""
    return option(Path(default), help, flag="--output -o", role="output", recorded=False)


def plot_option(help: str = "Also draw a picture") -> Any:  # noqa: A002
    """Return the field `plot`."""
    return option(None, f"{help}: .png, .svg or .html.", metavar="FILE", role="output", recorded=False)


class OutputOptions(Options):
    """Options of every command that measures: where its result goes."""

    output: Path = result_option("result.json")
    table: Path | None = option(
        None,
        "Also write the tables, unrounded: .csv, .md or .tex.",
        role="output",
        recorded=False,
    )
    plot: Path | None = plot_option()
    force: bool = option(False, "Replace an output that exists.", recorded=False)
    quiet: bool = option(False, "No notes, no progress, no table.", flag="--quiet -q", recorded=False)
    as_json: bool = option(False, "Print the result as JSON.", flag="--json", recorded=False)

    def check_outputs(self) -> None:
        """Refuse what could not be written in the end.

        Raises:
            OutputError: one of them exists and `force` is not given, is a directory, or lies in none.
            UsageError, PruneError: as `check_plot` and `check_table`; the table has the name of the output.
        """
        refuse_unwritable(self.output, force=self.force)
        if self.plot is not None:
            check_plot(self.plot, force=self.force)
        check_table(self.table, force=self.force)
        if self.table is not None and self.table.absolute() == self.output.absolute():
            raise UsageError(f"`table={self.table}`: the result is written there", "Choose another name.")

    def write(self, result: Any, leave_out: Sequence[str] = ()) -> None:
        """Write a result and its tables.

        Args:
            leave_out: see `write_table`.

        Raises:
            OutputError, UsageError: as `write_json` and `write_table`.
        """
        write_json(self.output, result.to_json(), force=self.force)
        write_table(self.table, result, force=self.force, leave_out=leave_out)

    def show(self, document: Callable[[], Any], tables: Callable[[], None]) -> None:
        """Print the result as JSON, or as tables with the names of its files; nothing with --quiet alone."""
        if self.as_json:
            console.print_json(document())
        elif not self.quiet:
            tables()
            console.note(written(self.output, self.plot, self.table))


def check_table(table: Path | None, *, force: bool) -> None:
    """Refuse a table that could not be written in the end.

    Raises:
        OutputError, UsageError: as `refuse_table`.
    """
    if table is not None:
        from prunecli.results.document import refuse_table

        refuse_table(table, force=force)


def write_table(path: Path | None, result: Document, *, force: bool, leave_out: Sequence[str] = ()) -> None:
    """Write the tables of a result where --table asks for them.

    Args:
        leave_out: names of tables that the terminal does not show.

    Raises:
        OutputError, UsageError: as `refuse_table`.
    """
    if path is None:
        return
    from prunecli.results.document import write_tables

    tables = {name: rows for name, rows in result.tables().items() if name not in leave_out}
    write_tables(path, tables, force=force)


def written(*paths: Path | None) -> str:
    """The line that says what was written: "Written to a, b and c."."""
    names = [str(path) for path in paths if path is not None]
    return f"Written to {' and '.join(filter(None, [', '.join(names[:-1]), names[-1]]))}."


def check_plot(plot: Path, *, force: bool) -> None:
    """Check before a long computation that its plot can be written.

    Raises:
        OutputError: the file exists and `force` is not given, it is a directory, or its directory does not exist.
        UsageError: the suffix is not .png, .svg or .html.
        PruneError: Altair or vl-convert is not installed.
    """
    from prunecli.report.charts import SUFFIXES, require_packages

    refuse_unwritable(plot, force=force)
    if plot.suffix.lower() not in SUFFIXES:
        raise UsageError(
            f"`plot={plot}`: unknown kind of file", f"Choose a name that ends in {', '.join(SUFFIXES)}."
        )
    require_packages()
