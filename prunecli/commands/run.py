"""`prunecli run` and `report`: the steps of a recipe, and one page of everything that a directory holds."""

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import typer

import prunecli
from prunecli import demo, processes
from prunecli.commands import console
from prunecli.commands.command import DRY_RUN, FORCE, QUIET, command, parameters
from prunecli.errors import UsageError
from prunecli.options import CheckpointPath, Options, argument, option
from prunecli.recipes.engine import (
    DIRECTORY,
    Step,
    bundled_recipes,
    find_recipe,
    parse_override,
    read_recipe,
    resolve,
)
from prunecli.tensors.transaction import refuse_unwritable


class Run(Options):
    """Options of the command."""

    name: str | None = argument("A YAML file, or the name of a recipe that comes with prunecli.", "RECIPE")
    assignments: tuple[str, ...] = option(
        "Give a variable of the recipe another value.", (), flag="--set", metavar="NAME=VALUE", repeated=True
    )
    lists: bool = option("Name the recipes that come with prunecli.", False, flag="--list")
    prints: bool = option("Print the recipe, to be saved and changed; run nothing.", False, flag="--print")
    html: Path | None = option("Also make a page of all that the recipe made.", role="output")
    dry_run: bool = DRY_RUN
    force: bool = FORCE
    quiet: bool = QUIET


@command
def run(options: Run) -> None:
    """Run the steps of a recipe in order, skipping those that are up to date.

    A step runs when its output is missing, or its arguments, its inputs or the version of prunecli changed.
    --force runs all of them, and replaces outputs that the recipe did not make.
    """
    from prunecli.recipes.run import page_step, preview, read_state, run_steps, state_file  # imports numpy

    name, html, force = options.name, options.html, options.force
    if options.lists:
        _list()
        return
    if name is None:
        _list()
        raise UsageError(
            "no recipe was named",
            "prunecli run NAME runs one of these: --dry-run says what it would do, --print what can be --set.",
        )
    recipe = find_recipe(name)
    label = Path(recipe.stem) if recipe.parent == DIRECTORY else recipe
    if options.prints:
        console.verbatim(recipe.read_text(encoding="utf-8").rstrip("\n"))
        return
    overrides = dict(parse_override(text) for text in options.assignments)
    steps = resolve(label, read_recipe(recipe), parameters(), overrides, builtin_variables(), console.note)
    if html is not None:
        steps.append(page_step(steps, html))
    state = state_file(recipe)
    if options.dry_run:
        for outcome in preview(steps, read_state(state) or {}, force):
            verdict = "up to date" if outcome.reason is None else f"would run: {outcome.reason}"
            console.verbatim(f"{outcome.step.name}: {verdict}\n  {_shown(outcome.step)}")
        return
    numbers = {step.name: f"[{number}/{len(steps)}]" for number, step in enumerate(steps, 1)}

    def starting(step: Step, reason: str | None) -> None:
        verdict = "up to date" if reason is None else _shown(step)
        console.note(f"{numbers[step.name]} {step.name}: {verdict}")

    try:
        outcomes = run_steps(steps, state, _execute, starting, force)
    except KeyboardInterrupt:  # the step has said so already
        console.warn(f"{label}: the same command resumes with this step.")
        raise typer.Exit(130) from None
    last = outcomes[-1]
    if last.status != 0:
        console.warn(
            f"{label}: step {last.step.name!r} failed with status {last.status}; "
            "once that is mended, the same command resumes with it."
        )
        raise typer.Exit(last.status)
    if html is None:
        console.note(f"A page of all that it made: prunecli run {name} --html report.html")


def _list() -> None:
    rows = [
        {"recipe": known, "what it does": read_recipe(path).description}
        for known, path in bundled_recipes().items()
    ]
    console.show([console.table("", rows, text_columns=2)])


def builtin_variables() -> Mapping[str, str]:
    """Variables of every recipe: the bundled models, their text, and what lies beside the bundled recipes."""
    return {
        "demo-checkpoint": str(demo.CHECKPOINT),
        "demo-data": str(demo.DATA),
        "demo-lm-checkpoint": str(demo.LM_CHECKPOINT),
        "demo-lm-data": str(demo.LM_DATA),
        "recipes": str(DIRECTORY),
    }


def _shown(step: Step) -> str:
    return shlex.join(["prunecli", step.command, *step.arguments])


def _execute(step: Step, replace: bool) -> int:
    """Run a step in a process of its own, so that its memory is given back; its exit status."""
    words, accepted = [sys.executable, "-m", "prunecli", step.command], parameters()[step.command]
    words += ["--force"] if replace and "force" in accepted else []
    words += ["--quiet"] if console.is_hushed() and "quiet" in accepted else []
    environment = {**processes.environment(), processes.PARENT: str(os.getpid())}
    return wait(subprocess.Popen([*words, *step.arguments], env=environment))


def wait(child: subprocess.Popen[bytes]) -> int:
    """The child's exit status as a shell says it; Ctrl-C and SIGTERM end the child first, then this."""
    with processes.terminations_as_exit():
        try:
            status = child.wait()
        except BaseException as error:
            _stop(child, error)
            raise
    return status if status >= 0 else 128 - status


def _stop(child: subprocess.Popen[bytes], error: BaseException) -> None:
    """Let the child clean up after Ctrl-C; a second one ends it at once."""
    try:
        # A terminal sends Ctrl-C to the child as well: once more would break off its cleaning up.
        if not (isinstance(error, KeyboardInterrupt) and _shares_terminal()):
            child.send_signal(signal.SIGINT if isinstance(error, KeyboardInterrupt) else signal.SIGTERM)
        child.wait()
    except BaseException:
        child.kill()
        child.wait()
        raise


def _shares_terminal() -> bool:
    try:
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except (OSError, ValueError):
        return False


STDOUT = Path("-")


class Report(Options):
    """Options of the command."""

    directory: Path = argument(
        "Directory of results and checkpoints. Default: this one.", "DIR", Path(), role="input"
    )
    originals: tuple[CheckpointPath, ...] = option(
        "Checkpoint elsewhere that a result or a history names, to be shown there; may be given again.",
        (),
        flag="--original",
        metavar="CHECKPOINT",
        role="checkpoint",
    )
    output: Path = option("The page; - for stdout.", Path("report.html"), flag="--output -o", role="output")
    force: bool = FORCE
    quiet: bool = QUIET


@command
def report(options: Report) -> None:
    """Make one self-contained page of the results and checkpoints in a directory.

    History, size, quality, speed, experts, heads, languages, similarity, training: whatever is there. No model is
    loaded, nothing is fetched, and the page opens without a network.
    """
    from prunecli.report.collect import collect
    from prunecli.report.page import report_page
    from prunecli.tensors.quantities import counted
    from prunecli.tensors.transaction import new_file

    output = options.output
    if output != STDOUT:
        refuse_unwritable(output, force=options.force)
    bundled = {"demo": prunecli.demo.CHECKPOINT, "demo-lm": prunecli.demo.LM_CHECKPOINT}
    if options.originals:
        from prunecli.evaluation.options import labels_for  # imports torch

        bundled |= labels_for(options.originals)
    data = collect(options.directory, bundled, console.progress())
    for name, reason in data.unreadable.items():
        console.warn(f"Unreadable, left out: {name}: {reason}")
    page = report_page(data)
    if output == STDOUT:
        typer.echo(page, nl=False)
    else:
        with new_file(output) as partial:
            partial.write_text(page, encoding="utf-8", newline="\n")
        checkpoints = counted(len(data.checkpoints), "checkpoint")
        results = counted(len(data.documents), "result file")
        console.note(f"{checkpoints}, {results}. Written to {output}.")
