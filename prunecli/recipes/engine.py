"""Recipes: steps, each one command, resolved into what would run; all faults are reported at once."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from prunecli.options import present_name
from prunecli.progress import Say, unsaid
from prunecli.recipes.text import (
    RecipeText,
    Resolved,
    StepText,
    applies,
    as_text,
    expand,
    faults_error,
    near,
    resolve_variables,
    substitute,
)
from prunecli.tensors.hub.names import HubName, checkpoint_path, expanded, hub_name
from prunecli.text.files import is_hub_data


@dataclass(frozen=True)
class Parameter:
    """An option or positional argument of a command, as a recipe sees it.

    Attributes:
        name: what a recipe calls it: the long option without its dashes, or the name of the positional.
        kind: how it is given on the command line.
        role: whether its value is a path that the step reads, one that it writes, a checkpoint that it reads (a path or
            a model of the hub), or something else.
        multiple: whether it takes several values.
        required: whether the command cannot do without.
        negative: the option that stands for false, where there is one.
        beside: with it the command also writes a directory, of its output's name and this ending.
        fault: what is wrong with a value, or None.
        path: the path that a value without a fault names, where the role is of one.
    """

    name: str
    kind: Literal["option", "flag", "positional"] = "option"
    role: Literal["input", "output", "checkpoint", "value"] = "value"
    multiple: bool = False
    required: bool = False
    negative: str | None = None
    beside: str = ""
    fault: Callable[[str], str | None] = lambda _value: None
    path: Callable[[str], Path] = Path


Commands = Mapping[str, Mapping[str, Parameter]]
"""Command -> its parameters by name."""

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
    overrides: Mapping[str, Resolved] | None = None,
    builtins: Mapping[str, Resolved] | None = None,
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
        if not applies(step_text, variables, number, faults):
            continue
        given = step_text.arguments.items()
        arguments = {
            present_name(step_text.command, f"--{name}", str(value), say)[2:]: value for name, value in given
        }
        step_text = step_text.model_copy(update={"arguments": arguments})
        for name, values in expand(step_text, variables, number, faults):
            earlier = [output for step in steps for output in step.makes]
            step = _resolve_step(step_text, name, values, commands, earlier, faults, pictures)
            steps += [] if step is None else [step]
    if not steps and not faults:
        faults.append("no step is left: no `when` holds, or every `for-each` is empty")
    settable = {name: value for name, value in variables.items() if name in text.variables}
    faults += _wiring_faults(steps) + _missing_inputs(steps, settable)
    if faults:
        raise faults_error(path, faults)
    left_out = f"no picture of {_joined(pictures)}: {_absent('altair')}" if pictures else None
    return Recipe(tuple(steps), left_out)


def _resolve_step(
    text: StepText,
    name: str,
    variables: Mapping[str, Resolved],
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
    models: list[HubName] = []
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
            words, fault = _command_line(parameter, value)
            (positionals if parameter.kind == "positional" else options).extend(words)
            faults += [] if fault is None else [f"{where}, {argument}: {fault}"]
            endings |= {parameter.beside} - {""}
            if parameter.role == "checkpoint":
                for path in map(checkpoint_path, _texts(value, parameter)):
                    made = any(related(path, output) or path.parent == output.parent for output in earlier)
                    model = None if made else hub_name(path)
                    paths["input"] += [path] if model is None else []
                    models += [] if model is None else [model]
            elif parameter.role != "value" and fault is None:
                named = map(parameter.path, _texts(value, parameter))
                paths[parameter.role] += (path for path in named if not is_hub_data(path))
                if any(map(is_hub_data, _texts(value, parameter))) and find_spec("datasets") is None:
                    faults.append(f"{where}, {argument}: {_absent('datasets')}")
    for parameter in parameters.values():
        # Without it the recipe would not know what the step makes.
        needed = parameter.required or (parameter.name == "output" and parameter.role == "output")
        if needed and parameter.name not in text.arguments:
            faults.append(f"{where}: {text.command} needs {parameter.name!r} here")
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


def _texts(value: Resolved, parameter: Parameter) -> list[str]:
    """One text for each value that the parameter takes; `~` in paths is expanded."""
    texts = [*map(as_text, value)] if isinstance(value, list) and parameter.multiple else [as_text(value)]
    return texts if parameter.role == "value" else [*map(expanded, texts)]


def _command_line(parameter: Parameter, value: Resolved) -> tuple[list[str], str | None]:
    """The words of one argument, and what is wrong with its value."""
    if parameter.kind == "flag":
        if not isinstance(value, bool):
            return [], f"it is a switch: give true or false, not {as_text(value)!r}"
        chosen = f"--{parameter.name}" if value else parameter.negative
        return ([] if chosen is None else [chosen]), None
    texts = _texts(value, parameter)
    fault = next((fault for fault in map(parameter.fault, texts) if fault is not None), None)
    if parameter.kind == "positional":
        return texts, fault
    return [word for text in texts for word in (f"--{parameter.name}", text)], fault


def lies_in(path: Path, directory: Path) -> bool:
    """Whether `path` is `directory` or lies below it, by name alone."""
    inner, outer = os.path.abspath(path), os.path.abspath(directory)  # noqa: PTH100 (links are left as they are)
    return inner == outer or inner.startswith(outer.rstrip(os.sep) + os.sep)


def related(path: Path, other: Path) -> bool:
    """Whether one of the two is the other or lies below it."""
    return lies_in(path, other) or lies_in(other, path)


def _wiring_faults(steps: Sequence[Step]) -> list[str]:
    faults = [
        f"step {name!r}: there are two steps of this name; put each `for-each` variable into it"
        for name, count in Counter(step.name for step in steps).items()
        if count > 1
    ]
    writers: list[tuple[Path, Step]] = []
    for step in steps:
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


def _missing_inputs(steps: Sequence[Step], settable: Mapping[str, Resolved]) -> list[str]:
    """One fault for each input that neither exists nor is made by then, with the variables that name the input."""
    faults, named = [], set[Path]()
    for number, step in enumerate(steps):
        outputs = [output for earlier in steps[:number] for output in earlier.makes]
        for source in step.inputs:
            if source in named or any(related(source, output) for output in outputs) or source.exists():
                continue
            named.add(source)
            later = (
                one for one in steps[number + 1 :] if any(lies_in(source, output) for output in one.makes)
            )
            reason = next((f"only the later step {one.name!r} makes it" for one in later), "no step makes it")
            given_by = [f"`assignments={name}=…`" for name, value in settable.items() if value == str(source)]
            remedy = f"; {' or '.join(given_by)} names another" if given_by else ""
            faults.append(f"step {step.name!r}: its input {source} does not exist, and {reason}{remedy}")
    return faults


def _joined(names: Sequence[str]) -> str:
    """Steps by name; of many the first alone, and how many more."""
    if len(names) > 3:
        return f"{names[0]!r} and {len(names) - 1} more"
    return " and ".join(filter(None, [", ".join(map(repr, names[:-1])), repr(names[-1])]))
