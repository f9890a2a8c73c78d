"""Recipes: steps, each one command, resolved into what would run; all faults are reported at once."""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from prunecli.options import Option, present_name
from prunecli.progress import Say, unsaid
from prunecli.recipes.text import (
    RecipeText,
    Resolved,
    StepText,
    Variables,
    as_text,
    expand,
    faults_error,
    near,
    resolve_variables,
    substitute,
)
from prunecli.tensors.hub.names import HubName, checkpoint_path, expanded, hub_name
from prunecli.text.files import TextFile, is_hub_data, parse_text_file

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
        accepts: which options of `PASSED_BY_RUN` the command has.
    """

    name: str
    command: str
    arguments: tuple[str, ...]
    inputs: tuple[Path, ...] = ()
    models: tuple[HubName, ...] = ()
    outputs: tuple[Path, ...] = ()
    beside: tuple[Path, ...] = ()
    accepts: frozenset[str] = frozenset()

    @property
    def key(self) -> str:
        """Key of the step's record: a step with other outputs (`--set out=…`) is another step."""
        return " ".join([self.name, *map(str, self.outputs)])

    @property
    def makes(self) -> tuple[Path, ...]:
        """All that it writes."""
        return (*self.outputs, *self.beside)


@dataclass(frozen=True)
class Recipe:
    """Steps of a recipe in order, and the pictures left out because a package is missing."""

    steps: tuple[Step, ...]
    left_out: str | None = None


def resolve(
    path: Path,
    text: RecipeText,
    commands: Commands,
    overrides: Variables | None = None,
    builtins: Variables | None = None,
    say: Say = unsaid,
) -> Recipe:
    """Fill in the variables, expand `for-each` and `when`, and check every step against the real command.

    Args:
        path: the recipe's file, for messages.
        commands: what each command accepts.
        overrides: values of --set, for variables that the recipe has.
        builtins: variables that every recipe has.
        say: called with a line about each old name of an option.

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
    without = f"no picture of {', '.join(map(repr, pictures))}: {_absent('altair')}" if pictures else None
    return Recipe(tuple(steps), without)


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
            (positionals if parameter.spec.argument else options).extend(words)
            faults += [] if fault is None else [f"{where}, {argument}: {fault}"]
            endings |= {parameter.spec.beside} - {""}
            role = parameter.spec.role
            if role == "checkpoint":
                for path in map(checkpoint_path, _texts(value, parameter)):
                    made = any(related(path, output) or path.parent == output.parent for output in earlier)
                    model = None if made else hub_name(path)
                    paths["input"] += [path] if model is None else []
                    models += [] if model is None else [model]
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
        needed = parameter.is_required or (known == "output" and parameter.spec.role == "output")
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
        accepts=frozenset(option for option in PASSED_BY_RUN if option in parameters),
    )


def _absent(package: str) -> str:
    return f"{package} is not installed (pip install {package})"


def _texts(value: Resolved, parameter: Option) -> list[str]:
    """One text for each value that the parameter takes; `~` in paths is expanded."""
    texts = (
        [*map(as_text, value)] if isinstance(value, list) and parameter.spec.repeated else [as_text(value)]
    )
    return texts if parameter.spec.role == "value" else [*map(expanded, texts)]


def _command_line(name: str, parameter: Option, value: Resolved) -> tuple[list[str], str | None]:
    """The words of one argument, and what is wrong with its value."""
    if parameter.is_switch:
        if not isinstance(value, bool):
            return [], f"it is a switch: give true or false, not {as_text(value)!r}"
        return [f"--{one}" for one in parameter.names if (one == name) == value], None
    texts = _texts(value, parameter)
    faults = (parameter.owner.fault(parameter.name, text) for text in texts)
    fault = next(filter(None, faults), None)
    if parameter.spec.argument:
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
