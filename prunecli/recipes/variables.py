"""The variables of a recipe: each with its value, filled in wherever a step names it, one step per `for-each` value."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from typing import Any

from prunecli.recipes.text import RecipeText, Resolved, Scalar, StepText, as_text

MOST_STEPS = 1000
"""Steps that one `for-each` may come to."""

LONGEST_TEXT = 100_000
"""Characters of a value with its variables filled in: they may double one another."""

_REFERENCE = re.compile(r"\$(?:(\$)|\{([^}]*)\})")


def substitute(value: Any, variables: Mapping[str, Resolved], where: str, faults: list[str]) -> Resolved:
    """`value` with `${name}` filled in; a reference that stands alone keeps its type, and lists flatten."""
    if isinstance(value, list):
        filled = [substitute(item, variables, where, faults) for item in value]
        return [scalar for item in filled for scalar in (item if isinstance(item, list) else [item])]
    if isinstance(value, bool):
        return value

    def known(name: str) -> Resolved:
        if name not in variables:
            faults.append(f"{where}: there is no variable {name!r}{near(name, variables)}")
            return ""
        return variables[name]

    alone = _REFERENCE.fullmatch(value)
    if alone is not None and alone[1] is None:
        return known(alone[2])
    filled_in = _REFERENCE.sub(lambda found: "$" if found[1] else as_text(known(found[2])), value)
    if len(filled_in) > LONGEST_TEXT:
        faults.append(f"{where}: longer than {LONGEST_TEXT:,} characters with its variables filled in")
        return ""
    return filled_in


def near(name: str, known: Iterable[str]) -> str:
    """What a fault adds about an unknown `name`."""
    found = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {found[0]!r}?" if found else f" (there are: {', '.join(sorted(known)) or 'none'})"


def resolve_variables(
    text: RecipeText, overrides: Mapping[str, Resolved], builtins: Mapping[str, Resolved], faults: list[str]
) -> dict[str, Resolved]:
    """Every variable's value, those of `overrides` in the place of the written ones; what is wrong joins `faults`."""
    for name in overrides:
        if name not in text.variables:
            faults.append(f"--set {name}: there is no such variable{near(name, text.variables)}")
    clashes = text.variables.keys() & builtins.keys()
    faults += [f"variables.{name}: every recipe has this one already" for name in sorted(clashes)]
    written = {name: overrides.get(name, value) for name, value in text.variables.items()}
    resolved: dict[str, Resolved] = dict(builtins)
    # A variable may name others in any order: fill in those that can be, until none is left or none can be.
    waiting = {name: value for name, value in written.items() if name not in clashes}
    while waiting:
        ready = [name for name, value in waiting.items() if not _names(value) & waiting.keys()]
        if not ready:
            faults.append(f"variables: {', '.join(waiting)} stand for one another")
            return {**resolved, **dict.fromkeys(waiting, "")}
        for name in ready:
            resolved[name] = substitute(waiting[name], resolved, f"variables.{name}", faults)
        waiting = {name: value for name, value in waiting.items() if name not in ready}
    return resolved


def _names(value: Any) -> set[str]:
    texts = [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, str)]
    return {found[2] for text in texts for found in _REFERENCE.finditer(text) if found[2] is not None}


def expand(
    step: StepText, variables: Mapping[str, Resolved], number: int, faults: list[str]
) -> Iterator[tuple[str, Mapping[str, Resolved]]]:
    """The step once for each combination of its `for-each` values: its name and the variables it sees."""
    choices: list[list[Scalar]] = []
    for name, values in step.for_each.items():
        filled = substitute(values, variables, f"steps[{number}].for-each.{name}", faults)
        choices.append(filled if isinstance(filled, list) else [filled])
        if name in variables:
            faults.append(f"steps[{number}].for-each.{name}: there is a variable of this name")
    if math.prod(map(len, choices)) > MOST_STEPS:
        faults.append(f"steps[{number}].for-each: more than {MOST_STEPS:,} combinations")
        return
    for combination in product(*choices):
        seen = {**variables, **dict(zip(step.for_each, combination, strict=True))}
        yield as_text(substitute(step.name, seen, f"steps[{number}].name", faults)), seen
