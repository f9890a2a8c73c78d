"""Recipes: YAML read strictly, variables filled in, steps resolved into what would run; all faults reported at once."""

import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from prunecli.errors import PruneError, UsageError, reason_of
from prunecli.options import Option, present_name
from prunecli.progress import Say, unsaid
from prunecli.tensors.hub.names import HubName, checkpoint_path, expanded, hub_name
from prunecli.tensors.json_files import read_bytes
from prunecli.text.files import TextFile, is_hub_data, near_names, parse_text_file

_PACKAGED = Path(__file__).parent / "files"
DIRECTORY = _PACKAGED if _PACKAGED.is_dir() else Path(__file__).parents[2] / "recipes"
"""Holds the recipes, and the configurations that they train from random weights: of a wheel or of a checkout."""

FIRST = ("quickstart", "shrink", "moe-language-model", "nllb-for-two-languages")
"""Those for a model of one's own; the others repeat experiments of papers."""


def bundled_recipes() -> Mapping[str, Path]:
    """Name -> file, those of `FIRST` first."""
    found = {path.stem: path for path in sorted(DIRECTORY.glob("*.yaml"))}
    return {name: found[name] for name in sorted(found, key=lambda name: ([*FIRST, name].index(name), name))}


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


Commands = Mapping[str, Mapping[str, Option]]
"""Command -> its options by the names that recipes give them."""

NEEDS = {"plot": "altair", "lora": "peft"}
"""Option -> the package that it needs and a plain installation lacks."""

PASSED_BY_RUN = ("force", "dry-run", "quiet", "help")
"""Options that `run` passes itself."""


@dataclass(frozen=True)
class Step:
    """A step with every variable filled in.

    Attributes:
        arguments: the command line after the command.
        inputs: paths that it reads: files, checkpoint directories, outputs of earlier steps.
        models: models of the hub that it reads.
        outputs: paths that it writes.
        beside: others that it writes and answers for itself: a training goes on with those of its interrupted run.
    """

    name: str
    command: str
    arguments: tuple[str, ...]
    inputs: tuple[Path, ...] = ()
    models: tuple[HubName, ...] = ()
    outputs: tuple[Path, ...] = ()
    beside: tuple[Path, ...] = ()

    @property
    def key(self) -> str:
        """Key of the step's record: a step with other outputs (`--set out=…`) is another step."""
        return " ".join([self.name, *map(str, self.outputs)])

    @property
    def makes(self) -> tuple[Path, ...]:
        """All that it writes."""
        return (*self.outputs, *self.beside)


def resolve(
    path: Path,
    text: RecipeText,
    commands: Commands,
    overrides: Variables | None = None,
    builtins: Variables | None = None,
    say: Say = unsaid,
) -> list[Step]:
    """Fill in the variables, expand `for-each` and `when`, and check every step against the real command.

    Args:
        path: the recipe's file, for messages.
        commands: what each command accepts.
        overrides: values of --set, for variables that the recipe has.
        builtins: variables that every recipe has.
        say: called with a line about each old name of an option, and about pictures that are left out.

    Returns:
        The steps in order.

    Raises:
        UsageError: with every fault found: an unknown command, option or variable, a value that the option
            does not take, two steps of one name or output, an input that neither exists nor is made by
            an earlier step, an option whose package is not installed. Pictures are left out instead.
    """
    faults: list[str] = []
    pictures: list[str] = []
    variables = resolve_variables(text, overrides or {}, builtins or {}, faults)
    steps: list[Step] = []
    for number, step_text in enumerate(text.steps, 1):
        where, left_out = f"steps[{number}].when", False
        for name, wanted in step_text.when.items():
            accepted = substitute(wanted, variables, f"{where}.{name}", faults)
            values = accepted if isinstance(accepted, list) else [accepted]
            if name not in variables:
                faults.append(f"{where}: there is no variable {name!r}{near(name, variables)}")
            elif as_text(variables[name]) not in map(as_text, values):
                left_out = True
        if left_out:
            continue
        given = step_text.arguments.items()
        arguments = {
            present_name(step_text.command, f"--{name}", str(value), say)[2:]: value for name, value in given
        }
        step_text = step_text.model_copy(update={"arguments": arguments})
        for name, seen in expand(step_text, variables, number, faults):
            earlier = [output for step in steps for output in step.makes]
            step = _resolve_step(step_text, name, seen, commands, earlier, faults, pictures)
            steps += [] if step is None else [step]
    if not steps and not faults:
        faults.append("no step is left: no `when` holds, or every `for-each` is empty")
    settable = {name: value for name, value in variables.items() if name in text.variables}
    faults += _faults_of(steps, settable)
    if faults:
        raise faults_error(path, faults)
    if pictures:
        say(f"{path}: no picture of {', '.join(map(repr, pictures))}: {_absent('altair')}")
    return steps


def _resolve_step(
    text: StepText,
    name: str,
    variables: Variables,
    commands: Commands,
    earlier: Sequence[Path],
    faults: list[str],
    pictures: list[str],
) -> Step | None:
    """The step, or None if there is no such command.

    Args:
        earlier: outputs of the steps before this one.
        pictures: gets the name of the step if its picture is left out.
    """
    where = f"step {name!r}"
    parameters = commands.get(text.command)
    if parameters is None:
        faults.append(f"{where}: there is no command {text.command!r}{near(text.command, commands)}")
        return None
    options: list[str] = []
    positionals: list[str] = []
    paths: dict[str, list[Path]] = {"input": [], "output": []}
    models = []
    endings: set[str] = set()
    for argument, written in text.arguments.items():
        value = substitute(written, variables, f"{where}, {argument}", faults)
        parameter = parameters.get(argument)
        if parameter is None:
            faults.append(f"{where}: {text.command} has no option {argument!r}{near(argument, parameters)}")
        elif argument in PASSED_BY_RUN:
            faults.append(f"{where}: {argument!r} is for `prunecli run` to pass, not for a recipe")
        elif argument in NEEDS and find_spec(NEEDS[argument]) is None:
            if argument == "plot":  # no later step reads a picture
                pictures.append(name)
            else:
                faults.append(f"{where}, {argument}: {_absent(NEEDS[argument])}")
        else:
            words, fault = _command_line(argument, parameter, value)
            (positionals if parameter.argument else options).extend(words)
            faults += [] if fault is None else [f"{where}, {argument}: {fault}"]
            endings |= {parameter.beside} - {""}
            role = parameter.role
            if role == "checkpoint":
                for path in map(checkpoint_path, _texts(value, parameter)):
                    made = any(related(path, output) or path.parent == output.parent for output in earlier)
                    if made or (model := hub_name(path)) is None:
                        paths["input"].append(path)
                    else:
                        models.append(model)
            elif role != "value" and fault is None:
                texts = _texts(value, parameter)
                is_named = parameter.type is TextFile
                named = [parse_text_file(text).path if is_named else Path(text) for text in texts]
                paths["output" if role == "output" else "input"] += [
                    path for path in named if not is_hub_data(path)
                ]
                if any(map(is_hub_data, named)) and find_spec("datasets") is None:
                    faults.append(f"{where}, {argument}: {_absent('datasets')}")
    for known, parameter in parameters.items():
        # Without it the recipe would not know what the step makes.
        needed = parameter.is_required or (known == "output" and parameter.role == "output")
        if needed and known not in text.arguments:
            faults.append(f"{where}: {text.command} needs {known!r} here")
    return Step(
        name=name,
        command=text.command,
        arguments=(*options, *(["--", *positionals] if positionals else [])),
        inputs=tuple(paths["input"]),
        models=tuple(models),
        outputs=tuple(paths["output"]),
        beside=tuple(Path(f"{output}{ending}") for ending in endings for output in paths["output"]),
    )


def _absent(package: str) -> str:
    return f"{package} is not installed (pip install {package})"


def _texts(value: Resolved, parameter: Option) -> list[str]:
    """One text for each value that the parameter takes; `~` in paths is expanded."""
    texts = [*map(as_text, value)] if isinstance(value, list) and parameter.repeated else [as_text(value)]
    return texts if parameter.role == "value" else [*map(expanded, texts)]


def _command_line(name: str, parameter: Option, value: Resolved) -> tuple[list[str], str | None]:
    """The words of one argument, and what is wrong with its value."""
    if parameter.is_switch:
        if not isinstance(value, bool):
            return [], f"it is a switch: give true or false, not {as_text(value)!r}"
        return [f"--{one}" for one in parameter.names if (one == name) == value], None
    texts = _texts(value, parameter)
    faults = (parameter.owner.fault(parameter.name, text) for text in texts)
    fault = next(filter(None, faults), None)
    if parameter.argument:
        return texts, fault
    return [word for text in texts for word in (f"--{name}", text)], fault


def lies_in(path: Path, directory: Path) -> bool:
    """Whether `path` is `directory` or lies below it, by name alone."""
    # Links are left as they are.
    return Path(os.path.abspath(path)).is_relative_to(os.path.abspath(directory))  # noqa: PTH100


def related(path: Path, other: Path) -> bool:
    """Whether one of the two is the other or lies below it."""
    return lies_in(path, other) or lies_in(other, path)


def _faults_of(steps: Sequence[Step], settable: Variables) -> list[str]:
    """Faults of names, of outputs in the way of others, and of inputs that neither exist nor are made by then.

    Args:
        settable: variables; those that name a missing input are told.
    """
    faults = [
        f"step {name!r}: there are two steps of this name; put each `for-each` variable into it"
        for name, count in Counter(step.name for step in steps).items()
        if count > 1
    ]
    writers: list[tuple[Path, Step]] = []
    named = set[Path]()
    for step in steps:
        for source in step.inputs:
            if source in named or any(related(source, output) for output, _ in writers) or source.exists():
                continue
            named.add(source)
            given_by = [f"`assignments={name}=…`" for name, value in settable.items() if value == str(source)]
            remedy = f"; {' or '.join(given_by)} names another" if given_by else ""
            faults.append(
                f"step {step.name!r}: its input {source} does not exist, and no earlier step makes it{remedy}"
            )
        for output in step.makes:
            faults += [
                f"step {step.name!r}: its output {output} is in the way of {other} of step {writer.name!r}"
                for other, writer in writers
                if related(output, other)
            ]
            if any(lies_in(source, output) for source in step.inputs):
                faults.append(f"step {step.name!r}: its output {output} would replace its input")
            writers.append((output, step))
    return faults
