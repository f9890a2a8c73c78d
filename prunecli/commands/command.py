"""The engine: from a class of options to a command of typer, to the parameters of recipes, and to a table of a page."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from prunecli.commands import console
from prunecli.errors import DataError, PruneError
from prunecli.options import Option, Options
from prunecli.tensors.hub.names import hub_name, no_such_directory
from prunecli.text.files import TextFile, is_hub_data, parse_text_file

if TYPE_CHECKING:
    from prunecli.recipes.engine import Parameter

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
"""Help panel -> commands; `collect-gates` is the function `collect_gates` of `commands/collect_gates.py`."""

Given = TypeVar("Given", bound=Options)


def command(options: type[Given]) -> Callable[[Callable[[Given], None]], Callable[..., None]]:
    """Return a decorator that makes a command of a function of these options.

    The command takes the options one by one, as text or as Python values. Errors and notes show fields as the command
    line spells them.
    """

    def decorate(function: Callable[[Given], None]) -> Callable[..., None]:
        @wraps(function)
        def run(*arguments: Any, **given: Any) -> None:
            own = options.list_options()
            values = {**dict(zip(own, arguments, strict=False)), **given}
            values = {
                name: own[name].value(value) for name, value in values.items() if value not in (None, [], ())
            }
            quiet = bool(values.get("quiet"))
            try:
                with console.hushed(quiet), console.speaking_of(options):
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

    return decorate


def _parameter(one: Option) -> inspect.Parameter:
    """Return the parameter that typer reads: text, several texts, or a switch; pydantic makes values of them."""
    kind: Any = bool if one.is_switch else list[str] if one.spec.repeated else str
    if one.spec.argument:
        info: Any = typer.Argument(metavar=one.metavar, help=one.described, show_default=False)
    else:
        names = f"{one.flag}/{one.negative}" if one.negative and one.negative != one.flag else one.flag
        info = typer.Option(
            *filter(None, (names, one.short)),
            metavar=one.metavar or None,
            help=one.described,
            rich_help_panel=one.spec.panel,
            hidden=one.spec.hidden,
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
            if one.spec.role == "checkpoint" and hub_name(path) is None and not path.exists():
                raise no_such_directory(path)
            if one.spec.role == "text" and not is_hub_data(path) and not path.exists():
                kind = "directory" if name == "data" else "file"
                raise DataError(f"{path}: no such {kind}", f"Name a {kind} that exists with `{name}`.")


def functions() -> Iterator[tuple[str, Callable[..., None]]]:
    """Name and function of each command."""
    for names in COMMANDS.values():
        for name in names:
            yield name, function_of(name)


def function_of(name: str) -> Callable[..., None]:
    """Return the function of a command."""
    module = name.replace("-", "_")
    found: Callable[..., None] = getattr(import_module(f"prunecli.commands.{module}"), module)
    return found


def options_of(function: Callable[..., None]) -> type[Options]:
    """Return the class of the options of a command's function."""
    found: type[Options] = vars(function)["options"]
    return found


def parameters() -> dict[str, dict[str, Parameter]]:
    """Command -> its parameters, for every command that a recipe can name."""
    return {name: parameters_of(options_of(function)) for name, function in functions() if name != "run"}


def parameters_of(options: type[Options]) -> dict[str, Parameter]:
    """Return the parameters of one command by the names that a recipe gives them; a switch has two."""
    from prunecli.recipes.engine import Parameter

    found = {}
    for name, one in options.list_options().items():
        names = dict.fromkeys(filter(None, (one.written, one.negative.removeprefix("--"))))
        for written in names:
            others = [f"--{other}" for other in names if other != written]
            found[written] = Parameter(
                name=written,
                kind="positional" if one.spec.argument else "flag" if one.is_switch else "option",
                role="input" if one.spec.role == "text" else one.spec.role,
                multiple=one.spec.repeated,
                required=one.is_required,
                negative=others[0] if others else None,
                beside=one.spec.beside,
                fault=lambda text, name=name: options.fault(name, text),  # type: ignore[misc]
                path=(lambda text: parse_text_file(text).path) if one.type is TextFile else Path,
            )
    return found


def table(options: type[Options]) -> str:
    """Return the options as a table of Markdown."""
    rows = ["| option | meaning |", "| --- | --- |"]
    for one in options.list_options().values():
        metavar = "" if one.is_switch else f" {one.metavar}"
        names = one.metavar if one.spec.argument else f"{one.flag}{metavar}"
        spelt = [names, *filter(None, (one.short, one.negative if one.negative != one.flag else ""))]
        shown = ", ".join(f"`{name}`" for name in spelt).replace("|", "\\|")
        rows.append(f"| {shown} | {one.described.replace('|', chr(92) + '|')} |")
    return "\n".join(rows) + "\n"
