"""Options that several commands have together: a frozen dataclass, one parameter of each of these commands."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from copy import copy
from dataclasses import fields, is_dataclass, replace
from functools import wraps
from typing import Annotated, Any, get_args, get_type_hints


class Without(frozenset[str]):
    """Fields of a group that are no options of a command: `Annotated[Group, Without({"seed"})]`."""


class Helps(dict[str, str]):
    """Help texts of a command's own for fields of a group: `Annotated[Group, Helps(seed="Seed of the order.")]`."""


def flattened(command: Callable[..., None]) -> Callable[..., None]:
    """Return `command` with an option for each field of the dataclasses among its parameters.

    The default of such a parameter is a dataclass with the defaults of these options.
    """
    hints = get_type_hints(command, include_extras=True)
    parameters: list[inspect.Parameter] = []
    groups: dict[str, tuple[Any, set[str]]] = {}
    for name, parameter in inspect.signature(command).parameters.items():
        kind, *metadata = get_args(hints[name]) or (hints[name],)
        if not is_dataclass(kind):
            parameters.append(parameter.replace(annotation=hints[name]))
            continue
        types = get_type_hints(kind, include_extras=True)
        helps = next((each for each in metadata if isinstance(each, Helps)), Helps())
        for option, text in helps.items():
            value, info = get_args(types[option])
            types[option] = Annotated[value, copy(info)]
            types[option].__metadata__[0].help = text
        left = next((each for each in metadata if isinstance(each, Without)), Without())
        options = [field.name for field in fields(kind) if field.name not in left]
        groups[name] = parameter.default, {*options}
        parameters += [
            parameter.replace(
                name=option, default=getattr(parameter.default, option), annotation=types[option]
            )
            for option in options
        ]

    @wraps(command)
    def run(*arguments: Any, **given: Any) -> None:
        for name, (default, options) in groups.items():
            given[name] = replace(default, **{option: given.pop(option) for option in options & {*given}})
        command(*arguments, **given)

    # Where typer, the recipes and the tests look for parameters.
    vars(run)["__signature__"] = inspect.Signature(parameters)
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run
