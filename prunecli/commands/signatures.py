"""The commands, and what each accepts, read from its function: help and recipes go by it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

from typer.models import ArgumentInfo, OptionInfo

from prunecli.errors import PruneError
from prunecli.tensors.hub.names import checkpoint_path
from prunecli.text.files import TextFile, parse_text_file

if TYPE_CHECKING:
    from prunecli.recipes.engine import Parameter

COMMANDS = {
    "Look": ("inspect", "explain"),
    "Prune experts (2212.09811)": ("collect-gates", "prune-experts", "compare-languages"),
    "Prune heads (1905.10650)": ("score-heads", "prune-heads", "compare-heads"),
    "Share FFNs and attention (2309.01826)": ("share-ffn", "share-attention"),
    "Prune depth and width": ("prune-layers", "prune-ffn"),
    "Shrink embeddings (1911.12385)": ("factorize-embeddings", "trim-vocabulary"),
    "Recover": ("finetune",),
    "Measure": ("evaluate", "bench-latency", "compare-models"),
    "Repeat": ("run", "report"),
}
"""Help panel -> commands; the file of `collect-gates` is `commands/collect_gates.py`, as is its function."""

OUTPUT_OPTIONS = ("output", "plot", "hypotheses", "table")
"""Options whose value is a path that the command writes."""
WRITTEN_BESIDE = {"save-every": ".steps", "keep-at": ".steps"}
"""Option -> the ending of a directory beside OUTPUT that the command writes with it."""


def signatures() -> dict[str, dict[str, Parameter]]:
    """Command -> its parameters, for every command that a recipe can name."""
    functions = {
        name: name.replace("-", "_") for names in COMMANDS.values() for name in names if name != "run"
    }
    return {
        name: signature(getattr(import_module(f"prunecli.commands.{function}"), function))
        for name, function in functions.items()
    }


def signature(function: Callable[..., Any]) -> dict[str, Parameter]:
    """The parameters of one command's function, as typer reads them from its annotations."""
    hints = get_type_hints(function, include_extras=True)
    defaults = {name: given.default for name, given in inspect.signature(function).parameters.items()}
    parameters = [_parameter(name, hints[name], default) for name, default in defaults.items()]
    named = {parameter.name: parameter for parameter in parameters}
    for parameter in parameters:
        if parameter.negative is not None:
            other = parameter.negative.removeprefix("--")
            named[other] = replace(parameter, name=other, negative=f"--{parameter.name}")
    return named


VALUE_NAMES = {int: "N", float: "X", Path: "PATH", str: "TEXT"}
"""Type -> what help calls a value of it; typer's own names, `<int range>` or all choices, do not fit the column."""


def value_names(function: Callable[..., Any]) -> dict[str, tuple[str, str]]:
    """Option that names no value of its own -> a short name for it, and the choices where its help lacks one."""
    names = {}
    for name, hint in get_type_hints(function, include_extras=True).items():
        annotated, *metadata = get_args(hint) if hasattr(hint, "__metadata__") else (hint,)
        value_type, _ = _value_type(annotated)
        info = next((item for item in metadata if isinstance(item, OptionInfo)), None)
        if info is None or info.metavar is not None or value_type is bool:
            continue
        choices = _choices(value_type)
        lacks = any(choice not in (info.help or "") for choice in choices)
        names[name] = "NAME" if choices else VALUE_NAMES[value_type], ", ".join(choices) if lacks else ""
    return names


def _parameter(name: str, hint: Any, default: Any) -> Parameter:
    from prunecli.recipes.engine import Parameter

    annotated, *metadata = get_args(hint) if hasattr(hint, "__metadata__") else (hint,)
    info = next((item for item in metadata if isinstance(item, (OptionInfo, ArgumentInfo))), None)
    value_type, multiple = _value_type(annotated)
    # In `Annotated`, typer keeps the first declared name where a default would stand.
    names = (getattr(info, "default", None), *(getattr(info, "param_decls", None) or ()))
    declared = [text for text in names if isinstance(text, str) and text.startswith("--")]
    positive, _, negative = (declared or ["--" + name.replace("_", "-")])[0].partition("/")
    positional = isinstance(info, ArgumentInfo)
    written = name if positional else positive.removeprefix("--")
    reads_or_writes: Literal["input", "output", "checkpoint"] = (
        "output" if written in OUTPUT_OPTIONS else "input"
    )
    if getattr(info, "parser", None) is checkpoint_path:
        reads_or_writes = "checkpoint"
    named = value_type is TextFile
    return Parameter(
        name=written,
        kind="positional" if positional else "flag" if value_type is bool else "option",
        role=reads_or_writes if value_type is Path or named else "value",
        multiple=multiple,
        required=default is inspect.Parameter.empty or default is ...,
        negative=negative or None,
        beside=WRITTEN_BESIDE.get(written, ""),
        fault=lambda text: _fault(text, value_type, info),
        path=(lambda text: parse_text_file(text).path) if named else Path,
    )


def _value_type(annotated: Any) -> tuple[Any, bool]:
    """The type of one value, and whether there may be several: `Optional[list[Path]]` -> (Path, True)."""
    if get_origin(annotated) in (Union, UnionType):
        annotated = next(part for part in get_args(annotated) if part is not type(None))
    if get_origin(annotated) is list:
        return get_args(annotated)[0], True
    return annotated, False


def _fault(text: str, value_type: Any, info: Any) -> str | None:
    """What is wrong with one value, or None; `info` is typer's of the parameter, where it has one."""
    parser = getattr(info, "parser", None)
    if parser is not None:
        try:
            parser(text)
        except PruneError as error:
            return error.message
        return None
    lowest, highest = getattr(info, "min", None), getattr(info, "max", None)
    choices = _choices(value_type)
    if choices:
        return None if text in choices else f"{text!r} is none of {', '.join(choices)}"
    if value_type not in (int, float):
        return None
    try:
        number = value_type(text)
    except ValueError:
        return f"{text!r} is not {'a whole number' if value_type is int else 'a number'}"
    if lowest is not None and number < lowest:
        return f"{text} is less than {lowest}"
    if highest is not None and number > highest:
        return f"{text} is more than {highest}"
    return None


def _choices(value_type: Any) -> list[str]:
    if get_origin(value_type) is Literal:
        return [str(choice) for choice in get_args(value_type)]
    return []
