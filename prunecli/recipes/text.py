"""Recipe files: the ones that come with prunecli, YAML read strictly, every field known, and variables filled in."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from prunecli.errors import PruneError, UsageError, reason_of
from prunecli.tensors.json_files import read_bytes
from prunecli.text.files import near_names

_PACKAGED = Path(__file__).parent / "files"
DIRECTORY = _PACKAGED if _PACKAGED.is_dir() else Path(__file__).parents[2] / "recipes"
"""Holds the recipes, and the configurations that they train from random weights: of a wheel or of a checkout."""

FIRST = ("quickstart", "shrink", "moe-language-model", "nllb-for-two-languages")
"""Those for a model of one's own; the others repeat experiments of papers."""


def bundled_recipes() -> Mapping[str, Path]:
    """Name -> file, those of `FIRST` first."""
    found = {path.stem: path for path in sorted(DIRECTORY.glob("*.yaml"))}
    return {name: found[name] for name in sorted(found, key=lambda name: ([*FIRST, name].index(name), name))}


def shown_name(recipe: Path) -> Path:
    """Return the name of a recipe for messages."""
    return Path(recipe.stem) if recipe.parent == DIRECTORY else recipe


def find_recipe(given: str) -> Path:
    """The file of this path, else the recipe of this name.

    Raises:
        PruneError: there is neither; it says what there is.
    """
    known, path = bundled_recipes(), Path(given)
    if path.is_file() or (given not in known and path.suffix in (".yaml", ".yml")):
        return path
    if given in known:
        return known[given]
    raise PruneError(
        f"{given}: no such file, and no recipe of this name", near_names(path.stem, known, "Recipes")
    )


MOST_STEPS = 1000
"""Steps that one `for-each` may come to, and values of one list: lists of lists would fill the memory."""

LONGEST_TEXT = 100_000
"""Characters of a value with its variables filled in: they may double one another."""

_REFERENCE = re.compile(r"\$(?:(\$)|\{([^}]*)\})")

Scalar = str | bool
Resolved = str | bool | list[Scalar]
"""A value of a recipe: text (numbers are kept as they were written), true or false, or a list of these."""
Variables = Mapping[str, Resolved]
"""Name of a variable -> its value."""


def _check_value(value: Any) -> Any:
    items = value if isinstance(value, list) else [value]
    if not all(isinstance(item, (str, bool)) for item in items):
        raise ValueError("give text, a number, true or false, or a list of these")
    return value


Value = Annotated[Any, AfterValidator(_check_value)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class StepText(_Model):
    """A step as it is written, before variables are filled in.

    Attributes:
        when: variable -> the value, or a list of values, with which the step is one of the recipe.
    """

    name: str = Field(min_length=1)
    command: str
    arguments: dict[str, Value] = {}
    for_each: dict[str, Value] = Field({}, alias="for-each")
    when: dict[str, Value] = {}


class RecipeText(_Model):
    """A recipe file as it is written."""

    description: str = ""
    variables: dict[str, Value] = {}
    steps: list[StepText] = Field(min_length=1)
    report: Any = Field(None, description="of earlier versions: a closing table; not read")


class _Loader(yaml.SafeLoader):
    """YAML where only true, false and null are special: `3:1`, `no` and `0.80` stay as they are written."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"]
        twice = [key for key in dict.fromkeys(keys) if keys.count(key) > 1]
        if twice:
            problem = f"{twice[0]!r} is given twice"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {}
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(?:true|false)$"), ["t", "f"])
_Loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"^(?:~|null|)$"), ["~", "n", ""])
_Loader.add_implicit_resolver("tag:yaml.org,2002:merge", re.compile(r"^<<$"), ["<"])


def read_recipe(path: Path) -> RecipeText:
    """Read a recipe file.

    Raises:
        PruneError: it is missing, or cannot be read.
        UsageError: it is not YAML, or has fields that a recipe has not; all faults are listed.
    """
    data = read_bytes(path, PruneError, "Give the path of a recipe: a YAML file of steps.")
    try:
        text = yaml.load(data, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f", line {error.problem_mark.line + 1}"
        raise UsageError(f"{path}{line}: this is not YAML: {error.problem}") from error
    except (yaml.YAMLError, RecursionError, ValueError, TypeError, AttributeError) as error:
        # The first also of bytes that are not UTF-8; the last three come from tags, such as `!!int x`.
        raise UsageError(f"{path}: this is not YAML of a recipe: {reason_of(error)}") from error
    if not isinstance(text, dict):
        raise UsageError(f"{path}: a recipe is a mapping that has `steps`")
    try:
        return RecipeText.model_validate({key: value for key, value in text.items() if value is not None})
    except ValidationError as error:
        known = {"extra_forbidden": "there is no such field", "missing": "it is missing"}
        faults = []
        for fault in error.errors():
            parts = (f"[{part + 1}]" if isinstance(part, int) else f".{part}" for part in fault["loc"])
            message = known.get(fault["type"], fault["msg"].removeprefix("Value error, "))
            faults.append(f"{''.join(parts).lstrip('.')}: {message}")
        raise faults_error(path, faults) from error


def faults_error(path: Path, faults: Sequence[str]) -> UsageError:
    """One error for all faults of a recipe, each on its line."""
    unique = list(dict.fromkeys(faults))
    if len(unique) == 1:
        return UsageError(f"{path}: {unique[0]}")
    return UsageError(f"{path}: {len(unique)} faults:\n" + "\n".join(f"  {fault}" for fault in unique))


def as_text(value: Resolved) -> str:
    """A value as the command line writes it; lists comma-separated."""
    if isinstance(value, list):
        return ",".join(as_text(item) for item in value)
    return str(value).lower() if isinstance(value, bool) else value


def parse_override(text: str) -> tuple[str, Resolved]:
    """`name=value` of `assignments`; the value is text, true or false, or a list in brackets.

    Raises:
        UsageError: there is no `=`, or the list does not close.
    """
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise UsageError(f"`assignments={text}`: expected name=value")
    if value in ("true", "false"):
        return name, value == "true"
    if not value.startswith("["):
        return name, value
    try:
        listed = yaml.load(value, Loader=_Loader)
        return name, list(_check_value(listed))
    except (yaml.YAMLError, ValueError) as error:
        raise UsageError(f"`assignments={text}`: this is not a list", "Write it as name=[a,b].") from error


def substitute(value: Any, variables: Variables, where: str, faults: list[str]) -> Resolved:
    """`value` with `${name}` filled in; a reference that stands alone keeps its type.

    In a list, an item that names variables with lists stands for one item with each of their values.
    """
    if isinstance(value, list):
        found = []
        for item in value:
            for seen in each(references(item), variables, where, faults):
                filled = substitute(item, seen, where, faults)
                found += filled if isinstance(filled, list) else [filled]
            if len(found) > MOST_STEPS:
                faults.append(f"{where}: more than {MOST_STEPS:,} values")
                return []
        return found
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
    filled_in = _REFERENCE.sub(lambda match: "$" if match[1] else as_text(known(match[2])), value)
    if len(filled_in) > LONGEST_TEXT:
        faults.append(f"{where}: longer than {LONGEST_TEXT:,} characters with its variables filled in")
        return ""
    return filled_in


def each(names: Iterable[str], variables: Variables, where: str, faults: list[str]) -> Iterator[Variables]:
    """The variables with one value in the place of each list among `names`: once for each combination."""
    lists = {name: value for name in names if isinstance(value := variables.get(name), list)}
    if math.prod(map(len, lists.values())) > MOST_STEPS:
        faults.append(f"{where}: more than {MOST_STEPS:,} combinations")
        return
    for combination in product(*lists.values()):
        yield {**variables, **dict(zip(lists, combination, strict=True))}


def near(name: str, known: Iterable[str]) -> str:
    """Return the suggestion for an unknown `name`."""
    return f" ({near_names(name, known)})"


def resolve_variables(
    text: RecipeText, overrides: Variables, builtins: Variables, faults: list[str]
) -> dict[str, Resolved]:
    """Every variable's value, those of `overrides` in the place of the written ones; what is wrong joins `faults`."""
    for name in overrides:
        if name not in text.variables:
            faults.append(f"`assignments={name}`: there is no such variable{near(name, text.variables)}")
    clashes = text.variables.keys() & builtins.keys()
    faults += [f"variables.{name}: every recipe has this one already" for name in sorted(clashes)]
    written = {name: overrides.get(name, value) for name, value in text.variables.items()}
    resolved: dict[str, Resolved] = dict(builtins)
    # A variable may name others in any order: fill in those that can be, until none is left or none can be.
    waiting = {name: value for name, value in written.items() if name not in clashes}
    while waiting:
        ready = [name for name, value in waiting.items() if waiting.keys().isdisjoint(references(value))]
        if not ready:
            faults.append(f"variables: {', '.join(waiting)} stand for one another")
            return {**resolved, **dict.fromkeys(waiting, "")}
        for name in ready:
            resolved[name] = substitute(waiting[name], resolved, f"variables.{name}", faults)
        waiting = {name: value for name, value in waiting.items() if name not in ready}
    return resolved


def references(value: Any) -> Iterator[str]:
    """Yield the variables that a value names, in order."""
    for item in value if isinstance(value, list) else [value]:
        for match in _REFERENCE.finditer(item) if isinstance(item, str) else ():
            if match[2] is not None:
                yield match[2]


def expand(
    step: StepText, variables: Variables, number: int, faults: list[str]
) -> Iterator[tuple[str, Variables]]:
    """The step once for each combination of its `for-each` values: its name and the variables it sees."""
    choices = {}
    for name, values in step.for_each.items():
        filled = substitute(values, variables, f"steps[{number}].for-each.{name}", faults)
        choices[name] = filled if isinstance(filled, list) else [filled]
        if name in variables:
            faults.append(f"steps[{number}].for-each.{name}: there is a variable of this name")
    for seen in each(choices, {**variables, **choices}, f"steps[{number}].for-each", faults):
        yield as_text(substitute(step.name, seen, f"steps[{number}].name", faults)), seen
