"""The engine: from a class of options to a command of typer, and to the parameters of recipes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import wraps
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from prunecli.commands import console
from prunecli.errors import DataError, PruneError, UsageError
from prunecli.options import Option, Options, option
from prunecli.tensors.hub.names import hub_name, no_such_directory
from prunecli.tensors.transaction import refuse_unwritable
from prunecli.text.files import TextFile, is_hub_data

if TYPE_CHECKING:
    from prunecli.results.document import Document

COMMANDS = {
    "Look": ("inspect", "explain"),
    "Measure what experts and heads do": ("collect-gates", "score-heads"),
    "Prune": ("shrink", "prune-experts", "prune-heads", "prune-ffn", "prune-layers", "trim-vocabulary"),
    "Share and factorize": ("share-ffn", "share-attention", "factorize-embeddings"),
    "Recover": ("finetune",),
    "Evaluate": ("evaluate", "bench-latency"),
    "Compare": ("compare-models", "compare-languages", "compare-heads"),
    "Repeat and report": ("run", "report"),
}
"""Help panel -> commands; `collect-gates` is the function `collect_gates`."""
FILES = ("inspect", "measure", "prune", "share", "finetune", "evaluate", "compare", "run")
"""Modules of this package with the commands of each panel."""

Function = Callable[..., None]
"""A command, which takes its options one by one."""


def command(function: Callable[[Any], None]) -> Function:
    """Make a command of a function that takes `options`, of a class of them.

    The command takes the options one by one, as text or as Python values. Errors and notes show fields as the command
    line spells them.
    """
    options: type[Options] = get_type_hints(function)["options"]

    @wraps(function)
    def run(**given: Any) -> None:
        own = options.list_options()
        values = {
            name: own[name].value(value) for name, value in given.items() if value not in (None, [], ())
        }
        try:
            with console.speaking_of(options, quiet=bool(values.get("quiet"))):
                made = options(**values)
                refuse_absent(made)
                function(made)
        except PruneError as error:
            error.message = options.as_typed(error.message)
            error.remedy = error.remedy and options.as_typed(error.remedy)
            raise

    parameters = [_parameter(one) for one in options.list_options().values()]
    vars(run)["__signature__"] = inspect.Signature(parameters)
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    vars(run)["options"] = options
    return run


def _parameter(one: Option) -> inspect.Parameter:
    """Return the parameter that typer reads: text, several texts, or a switch; pydantic makes values of them."""
    kind: Any = bool if one.is_switch else list[str] if one.repeated else str
    if one.argument:
        info: Any = typer.Argument(metavar=one.metavar, help=one.described, show_default=False)
    else:
        names = f"{one.flag}/{one.negative}" if one.negative and one.negative != one.flag else one.flag
        info = typer.Option(
            *filter(None, (names, one.short)),
            metavar=one.metavar or None,
            help=one.described,
            rich_help_panel=one.panel,
            hidden=one.hidden,
            show_default=False,
        )
    required = one.is_required
    return inspect.Parameter(
        one.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if required else None,
        annotation=Annotated[kind if required else kind | None, info],
    )


def refuse_absent(options: Options) -> None:
    """Refuse checkpoints and text that do not exist, before anything is loaded.

    Raises:
        CheckpointError: a checkpoint is a path that leads nowhere.
        DataError: a file or directory of text does not exist.
    """
    for name, one in type(options).list_options().items():
        value = getattr(options, name)
        for given in value if isinstance(value, tuple) else (value,):
            path = given.path if isinstance(given, TextFile) else given
            if not isinstance(path, Path):
                continue
            if one.role == "checkpoint" and hub_name(path) is None and not path.exists():
                raise no_such_directory(path)
            if one.role == "text" and not is_hub_data(path) and not path.exists():
                kind = "directory" if name == "data" else "file"
                raise DataError(f"{path}: no such {kind}", f"Name a {kind} that exists with `{name}`.")


def function_of(name: str) -> Function:
    """Return the function of a command."""
    file = next(file for file, names in zip(FILES, COMMANDS.values(), strict=True) if name in names)
    found: Function = getattr(import_module(f"prunecli.commands.{file}"), name.replace("-", "_"))
    return found


def options_of(function: Function) -> type[Options]:
    """Return the class of the options of a command's function."""
    found: type[Options] = vars(function)["options"]
    return found


def parameters() -> dict[str, dict[str, Option]]:
    """Command -> its options by the names that a recipe gives them, for every command that a recipe can name."""
    return {
        command: {
            name: one
            for one in options_of(function_of(command)).list_options().values()
            for name in one.names
        }
        for command in chain(*COMMANDS.values())
        if command != "run"
    }


def result_option(default: str, help: str = "File of the result.") -> Any:  # noqa: A002
    """Return the field `output` of a command that measures."""
    return option(help, Path(default), flag="--output -o", role="output")


def plot_option(help: str = "Also draw a picture") -> Any:  # noqa: A002
    """Return the field `plot`."""
    return option(f"{help}: .png, .svg or .html.", role="output")


DRY_RUN = option("Show what would be done; write nothing.", False, recorded=False)
FORCE = option("Replace an output that exists.", False, recorded=False)
QUIET = option("No notes, no progress, no table.", False, flag="--quiet -q", recorded=False)
AS_JSON = option("Print the result as JSON.", False, flag="--json", recorded=False)
"""Fields `dry_run`, `force`, `quiet` and `as_json`."""


class OutputOptions(Options):
    """Options of every command that measures: where its result goes."""

    output: Path = result_option("result.json")
    table: Path | None = option(
        "Also write the tables, unrounded: .csv, .md or .tex.",
        role="output",
    )
    plot: Path | None = plot_option()
    force: bool = FORCE
    quiet: bool = QUIET
    as_json: bool = AS_JSON

    def check_outputs(self) -> None:
        """Refuse what could not be written in the end.

        Raises:
            OutputError: one of them exists and `force` is not given, is a directory, or lies in none.
            UsageError, PruneError: as `check_plot` and `refuse_table`; the table has the name of the output.
        """
        refuse_unwritable(self.output, force=self.force)
        if self.plot is not None:
            check_plot(self.plot, force=self.force)
        self.check_table()
        if self.table is not None and self.table.absolute() == self.output.absolute():
            raise UsageError(f"`table={self.table}`: the result is written there", "Choose another name.")

    def check_table(self) -> None:
        """Refuse a table that could not be written in the end.

        Raises:
            OutputError, UsageError: as `refuse_table`.
        """
        if self.table is not None:
            from prunecli.results.document import refuse_table

            refuse_table(self.table, force=self.force)

    def write_table(self, result: Document) -> None:
        """Write the tables of a result if --table asks for them."""
        if self.table is not None:
            from prunecli.results.document import write_tables

            tables = {name: rows for name, rows in result.tables().items() if name not in result.summed_up}
            write_tables(self.table, tables, force=self.force)

    def finish(
        self,
        result: Document,
        blocks: Iterable[Any],
        pictures: Callable[[Any], Any] | None = None,
        *,
        title: str = "",
        is_written: bool = False,
    ) -> None:
        """Write a result, its tables and its plot, and print the result.

        Args:
            blocks: tables and lines that show the result.
            pictures: from the module `report.pictures` to rows of pictures. If None, those of `pictures_of`.
            title: title of the plot.
            is_written: whether the file of the result is there already.
        """
        if not is_written:
            result.write(self.output, force=self.force)
        self.write_table(result)
        if self.plot is not None:
            from prunecli.report import pictures as draw
            from prunecli.report.render import save_pictures

            rows = [*(draw.pictures_of(result) if pictures is None else pictures(draw))]
            if not any(rows):
                raise PruneError("There is nothing to draw.")
            save_pictures(rows, self.plot, title)
        self.show(result.to_json, blocks)

    def show(self, document: Callable[[], Any], blocks: Iterable[Any]) -> None:
        """Print the result as JSON, or as tables with the names of its files; nothing with --quiet alone."""
        console.result(document, blocks, as_json=self.as_json)
        if not self.as_json:
            names = [str(path) for path in (self.output, self.plot, self.table) if path is not None]
            console.note(f"Written to {console.listed(names, 'and')}.")


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
