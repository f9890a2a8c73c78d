"""Running the steps of a recipe, of which those are skipped that are up to date; and the page of all that they made."""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel

from prunecli import __version__
from prunecli.errors import OutputError, UsageError
from prunecli.recipes.engine import Step, lies_in, related
from prunecli.tensors.hub.fetch import commit_of
from prunecli.tensors.json_files import lenient, read_json
from prunecli.tensors.transaction import digest, write_json

HASHED_WHOLE_BYTES = 16 * 2**20
"""Larger files of a directory (weights) are told apart by size and time of change: hashing 200 GB is slow."""


def identity(path: Path, exclude: Iterable[Path] = ()) -> str | None:
    """Return a digest of the content at `path`; None: there is nothing.

    Args:
        path: a file (hashed whole) or a directory (names, sizes, contents; hidden files left out).
        exclude: paths below a directory that do not count, such as the output of the step that reads it.
    """
    if path.is_file():
        return f"file:{path.stat().st_size}:{_file_hash(path)}"
    if not path.is_dir():
        return None
    found = []
    for file in sorted(path.rglob("*")):  # without the files in linked directories, which may lead back up
        name = file.relative_to(path)
        is_hidden = any(part.startswith(".") for part in name.parts)
        if is_hidden or not file.is_file() or any(lies_in(file, one) for one in exclude):
            continue
        status = file.stat()
        content = _file_hash(file) if status.st_size <= HASHED_WHOLE_BYTES else status.st_mtime_ns
        found.append(f"{name.as_posix()}\0{status.st_size}\0{content}\n")
    return f"directory:{hashlib.sha256(''.join(found).encode()).hexdigest()}"


def _file_hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def inputs_of(step: Step) -> dict[str, str | None]:
    """Return the inputs of a step -> digest of the content; for a model of the hub, the commit.

    Raises:
        HubError: a model that cannot be had.
    """
    files = {str(source): identity(source, exclude=step.outputs) for source in step.inputs}
    return files | {str(model): commit_of(model) for model in step.models}


def fingerprint(step: Step, inputs: Mapping[str, str | None]) -> str:
    """sha256 over the command, its arguments, the version of prunecli and the content of the inputs."""
    return digest([step.command, step.arguments, __version__, inputs])


class Record(BaseModel):
    """Record of a finished step: its fingerprint, and the digest of each output and input."""

    fingerprint: str
    outputs: dict[str, str | None]
    inputs: dict[str, str | None] = {}


State = Mapping[str, Record]
"""Step's key -> its record."""


class _StateFile(BaseModel):
    format: Literal["prunecli.run/1"] = "prunecli.run/1"
    prunecli: str = __version__
    steps: State


def state_file(recipe: Path) -> Path:
    """Return the file with the state of a recipe, in the working directory."""
    return Path(".prunecli", f"{recipe.stem}.json")


@lenient
def read_state(path: Path) -> State:
    """The recorded state; None (all steps run) where there is none or where it is damaged."""
    return _StateFile(**read_json(path)).steps


def write_state(path: Path, state: State) -> None:
    """Record the state, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, _StateFile(steps=state).model_dump(), force=True)


def stale_reason(step: Step, state: State, remade: Sequence[Path] = ()) -> str | None:
    """Why a step has to run, or None where it is up to date.

    Args:
        remade: outputs of steps that a dry run would run before this one.
    """
    for source in step.inputs:
        if any(related(source, output) for output in remade):
            return f"{source} is made anew"
    record = state.get(step.key)
    if not step.outputs:
        return "it writes no file"
    for output in step.makes:
        if not output.exists():
            return f"{output} does not exist"
    if record is None:
        return "it has not run yet"
    inputs = inputs_of(step)
    if record.fingerprint != fingerprint(step, inputs):
        changed = [name for name, content in inputs.items() if record.inputs.get(name, content) != content]
        return (
            f"{', '.join(changed)} changed" if changed else "its arguments or the version of prunecli changed"
        )
    for output in step.outputs:
        if record.outputs.get(str(output)) != identity(output):
            return f"{output} changed since"
    return None


@dataclass(frozen=True)
class Outcome:
    """Outcome of a step: skipped (no reason to run), or run for `reason` with exit status `status`."""

    step: Step
    reason: str | None
    status: int = 0


def preview(steps: Sequence[Step], state: State, force: bool = False) -> Iterator[Outcome]:
    """Yield the steps that a run would carry out, as far as they are known beforehand."""
    remade: list[Path] = []
    for step in steps:
        reason = "--force" if force else stale_reason(step, state, remade)
        yield Outcome(step, reason)
        if reason is not None:
            remade += step.makes


def run_steps(
    steps: Sequence[Step],
    path: Path,
    execute: Callable[[Step, bool], int],
    starting: Callable[[Step, str | None], None] = lambda _step, _reason: None,
    force: bool = False,
) -> list[Outcome]:
    """Run what is not up to date, in order, and record each step that ended well.

    Args:
        path: the state file.
        execute: runs a step, replacing its output if the second argument says so; returns its exit status.
        starting: is told of each step and why it runs (None: it is skipped).
        force: run every step, and replace outputs that this recipe did not make.

    Returns:
        The outcomes up to and with the first step that failed.

    Raises:
        OutputError: an output is in the way, or a step ended well without writing its output.
    """
    state = dict(read_state(path) or {})
    own = {name: content for record in state.values() for name, content in record.outputs.items()}
    # Before the first step: outputs are replaced only if this recipe made them and nobody changed them since.
    for step in () if force else steps:
        for output in () if stale_reason(step, state) is None else step.outputs:
            if output.exists() and own.get(str(output)) != identity(output):
                changed = "changed after" if str(output) in own else "exists, and was not made by"
                raise OutputError(
                    f"{output} {changed} this recipe's step {step.name!r}",
                    "Move it away, or give `force` to replace it.",
                )
    outcomes = []
    for step in steps:
        reason = "--force" if force else stale_reason(step, state)
        starting(step, reason)
        status = 0
        if reason is not None:
            inputs = inputs_of(step)
            for output in step.outputs:
                output.parent.mkdir(parents=True, exist_ok=True)
            status = execute(step, any(output.exists() for output in step.outputs))
        outcomes.append(Outcome(step, reason, status))
        if status != 0:
            return outcomes
        if reason is not None:
            written = {str(output): identity(output) for output in step.outputs}
            for name, content in written.items():
                if content is None:
                    raise OutputError(f"step {step.name!r} ended well but did not write {name}")
            state[step.key] = Record(fingerprint=fingerprint(step, inputs), outputs=written, inputs=inputs)
            write_state(path, state)
    return outcomes


def page_step(steps: Sequence[Step], page: Path) -> Step:
    """`prunecli report` of the folder that holds what the steps write, with the checkpoints that they began with.

    Raises:
        UsageError: their outputs lie in no one folder, or one of them is in the way of the page.
    """
    outputs = [output for step in steps for output in step.makes]
    in_the_way = next((output for output in outputs if related(page, output)), None)
    if in_the_way is not None:
        raise UsageError(f"`html={page}`: {in_the_way} of the recipe is in the way", "Choose another name.")
    here = Path.cwd()
    try:
        common = Path(os.path.commonpath([(here / output).parent for output in outputs]))
    except ValueError:  # nothing is written, or it goes to several drives
        common = here.parent
    if here.is_relative_to(common) and here != common:
        raise UsageError(
            "`html`: the outputs of the recipe lie in no one folder", "Let its steps write into one folder."
        )
    folder = common.relative_to(here) if common.is_relative_to(here) else common
    originals = [
        path
        for step in steps
        for path in step.inputs
        if (path / "config.json").is_file() and not any(related(path, output) for output in outputs)
    ]
    models = [model for step in steps for model in step.models]
    named = dict.fromkeys(map(str, [*originals, *models]))
    return Step(
        name=f"--html {page}",
        command="report",
        arguments=(
            *(word for name in named for word in ("--original", name)),
            *("--output", str(page), "--", str(folder)),
        ),
        inputs=(*outputs, *dict.fromkeys(originals)),
        models=tuple(dict.fromkeys(models)),
        outputs=(page,),
    )
