import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Literal
from unittest.mock import Mock

import pytest
import typer

from prunecli.commands import console, run
from prunecli.commands.command import parameters
from prunecli.errors import PruneError, UsageError
from prunecli.options import Options, argument, option
from prunecli.recipes.engine import Step, bundled_recipes, find_recipe, read_recipe, resolve
from tests.commands.calls import call, refused
from tests.commands.gates import write_gates

RECIPE = """\
variables: {ratio: 0.75, out: made}
steps:
  - name: compare-${ratio}
    command: compare-languages
    arguments: {gates: gates.json, ratio: "${ratio}", output: "${out}/languages.json"}
"""


class Example(Options):
    first: Path | None = argument("", "FIRST", role="input")
    files: tuple[Path, ...] = option("", (), role="input")
    number: int = option("", 1, flag="--number -n", ge=1, le=9)
    color: Literal["red", "dark-red"] = option("", "red")
    memory: bool = option("", True, flag="--memory/--no-memory")
    output: Path = option("", Path("a"), flag="--output -o", role="output")
    plain_name: str = option("", "")


@pytest.mark.parametrize(
    ("name", "value", "fault"),
    [
        ("number", "9", None),
        ("number", "0", "must be greater than or equal to 1"),
        ("number", "10", "must be less than or equal to 9"),
        ("number", "1.5", "must be a valid integer"),
        ("color", "dark-red", None),
        ("color", "dark_red", "no such choice: choose one of red, dark-red"),
        ("plain-name", "anything", None),
    ],
)
def test_values_are_checked_beforehand(name, value, fault):
    assert Example.fault(name.replace("-", "_"), value) == fault


def test_every_command_that_writes_has_an_output():
    for name, known in parameters().items():
        assert name in ("inspect", "explain") or known["output"].role == "output"


@pytest.mark.parametrize("path", bundled_recipes().values(), ids=lambda path: path.stem)
def test_shipped_recipes_fit_the_real_commands(path):
    # What some of them ask their user for.
    for name in ("nllb-moe-54b", "flores200_dataset", "classifier", "sentence-encoder"):
        Path(name).mkdir()
    for name in ("train.tsv", "dev.tsv", "train.txt", "valid.txt", "test.txt"):
        Path(name).write_text("0\ta\n")
    assert resolve(path, read_recipe(path), parameters(), {}, run.builtin_variables())


def test_files_of_named_texts_are_inputs():
    Path("prose.txt").write_text("a\n")
    text = """\
variables: {names: [prose, code]}
steps: [{name: a, command: COMMAND, arguments: {text: ["${names}=${names}.txt"], output: o.json}}]
"""
    path = Path("recipe.yaml")
    for name in ("collect-gates", "evaluate"):
        path.write_text(text.replace("COMMAND", name))
        with pytest.raises(UsageError, match=r"its input code\.txt does not exist"):
            resolve(path, read_recipe(path), parameters())
        Path("code.txt").write_text("a\n")
        (step,) = resolve(path, read_recipe(path), parameters())
        assert step.inputs == (Path("prose.txt"), Path("code.txt"))
        assert step.arguments[:4] == ("--text", "prose=prose.txt", "--text", "code=code.txt")
        Path("code.txt").unlink()
    path.write_text(text.replace("COMMAND", "collect-gates").replace("${names}=", "="))
    with pytest.raises(UsageError, match=r"step 'a', text: --text =prose\.txt: no name"):
        resolve(path, read_recipe(path), parameters())


def test_bundled_recipes_are_listed_printed_and_found_by_name():
    listed = prunecli("--list").out
    assert [name for name in bundled_recipes() if name not in listed] == []
    Path("mine.yaml").write_text(prunecli("quickstart --print").out)
    by_name, by_path = (prunecli(name, "--dry-run").out for name in ("quickstart", "mine.yaml"))
    assert by_name.startswith("collect-gates: would run: ")
    assert by_name == by_path


def test_a_file_goes_before_a_bundled_recipe_of_its_name():
    Path("quickstart").write_text("steps: []")
    assert find_recipe("quickstart") == Path("quickstart")


prunecli = partial(call, run.run)


@pytest.fixture
def workplace():
    write_gates()
    Path("recipe.yaml").write_text(RECIPE)


def test_a_recipe_runs_its_commands_once(workplace):
    prunecli("recipe.yaml --dry-run").shows("compare-0.75: would run: made/languages.json does not exist")
    assert not Path("made").exists()
    first = prunecli("recipe.yaml")
    assert first.status == 0, first.err
    assert Path("made/languages.json").is_file()
    assert "[1/1] compare-0.75: prunecli compare-languages" in first.err
    assert "[1/1] compare-0.75: up to date" in prunecli("recipe.yaml").err
    changed = prunecli("recipe.yaml --set ratio=0.5 --quiet")
    assert (changed.status, changed.out) == (0, "")


PLOTTED = """\
steps:
  - {name: COMMAND, command: COMMAND, arguments: {OPTION, output: made}}
"""


@pytest.mark.parametrize(
    ("package", "command", "options", "option"),
    [
        ("altair", "compare-languages", "gates: gates.json, plot: a.png", None),
        ("peft", "finetune", "lora: 4", "lora"),
        ("datasets", "evaluate", "checkpoints: [], text: 'hf://org/name:train'", "text"),
    ],
)
def test_packages_are_looked_for_before_the_first_step(
    workplace, monkeypatch, capsys, package, command, options, option
):
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    Path("recipe.yaml").write_text(PLOTTED.replace("COMMAND", command).replace("OPTION", options))
    missing = f"{package} is not installed (pip install {package})"
    if option is not None:
        with pytest.raises(UsageError) as caught:
            run.run(name="recipe.yaml")
        assert caught.value.message == f"recipe.yaml: step {command!r}, {option}: {missing}"
        return
    run.run(name="recipe.yaml", dry_run=True)
    said = capsys.readouterr()
    assert "--plot" not in said.out
    assert said.err == f"recipe.yaml: no picture of {command!r}: {missing}\n"


def test_a_failing_step_ends_the_run_with_its_status(workplace, capfd):
    Path("gates.json").write_text("{")
    refused(prunecli("recipe.yaml"), "recipe.yaml: step 'compare-0.75' failed with status 1", 1)
    assert "gates.json" in (said := capfd.readouterr().err)
    assert "Traceback" not in said


def test_the_recipe_of_the_page_is_one():
    page = Path(__file__).parents[2] / "docs/reference/commands/run.md"
    path = Path("page.yaml")
    path.write_text(page.read_text(encoding="utf-8").split("```yaml\n")[1].split("```")[0], encoding="utf-8")
    steps = resolve(path, read_recipe(path), parameters(), {}, run.builtin_variables())
    assert [step.command for step in steps] == ["collect-gates", "prune-experts", "prune-experts"]


@pytest.mark.parametrize(
    ("given", "remedy"),
    [
        ("quikstart", r"Did you mean quickstart\?"),
        ("nllb", r"Did you mean nllb-for-two-languages or nllb-moe-54b\?"),
        ("nothing-like-it", "Recipes: "),
    ],
)
def test_an_unknown_name_is_refused(given, remedy):
    said = f"^{given}: no such file, and no recipe of this name\n{remedy}.*$"
    with pytest.raises(PruneError, match=said) as caught:
        find_recipe(given)
    assert caught.value.exit_status == 1


def test_what_lies_beside_outputs_is_no_model_of_the_hub():
    """`out/kind` could name one."""
    Path("recipe.yaml").write_text("""\
steps:
  - {name: a, command: prune-layers, arguments: {checkpoint: org/name, output: out/model}}
  - {name: b, command: prune-layers, arguments: {checkpoint: out/modell, output: out/small}}
""")
    path = Path("recipe.yaml")
    with pytest.raises(UsageError, match=r"recipe.yaml: step 'b': its input out/modell does not exist"):
        resolve(path, read_recipe(path), parameters())


def test_force_and_quiet_reach_the_commands_that_have_them(monkeypatch):
    words = []
    monkeypatch.setattr(subprocess, "Popen", lambda given, env: words.append(given))
    monkeypatch.setattr(run, "wait", lambda child: 0)
    step = Step("a", "evaluate", ("--beam", "4"))
    with console.speaking_of(Options, quiet=True):
        run._execute(step, True)
        run._execute(Step("b", "explain", ()), True)
    assert words[0][1:] == ["-m", "prunecli", "evaluate", "--force", "--quiet", "--beam", "4"]
    assert words[1][1:] == ["-m", "prunecli", "explain"]


CHILD = """
import pathlib, signal, sys, time
def clean(number, frame):
    pathlib.Path("cleaned").write_text(str(number))
    sys.exit(1)
signal.signal(signal.SIGINT, clean)
signal.signal(signal.SIGTERM, clean)
pathlib.Path("started").touch()
time.sleep(60)
"""
PARENT = """
import subprocess, sys
from prunecli.commands.run import wait
wait(subprocess.Popen([sys.executable, "child.py"]))
"""


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
def test_an_interrupt_lets_the_step_clean_up():
    Path("child.py").write_text(CHILD)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    nothing = dict.fromkeys(("stdin", "stderr"), subprocess.DEVNULL)
    parent = subprocess.Popen([sys.executable, "-c", PARENT], env=environment, **nothing)
    try:
        deadline = time.monotonic() + 120
        while not Path("started").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        parent.send_signal(signal.SIGTERM)
        assert parent.wait(30) != 0
    finally:
        parent.kill()
    assert Path("cleaned").read_text() == str(int(signal.SIGTERM))


def test_an_interrupt_is_said_once_by_the_step_and_how_to_go_on_by_the_recipe(workplace, monkeypatch, capsys):
    monkeypatch.setattr(run, "_execute", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(typer.Exit) as ended:
        run.run(name="recipe.yaml")
    assert ended.value.exit_code == 130
    (said,) = capsys.readouterr().err.splitlines()[1:]
    assert said == "recipe.yaml: the same command resumes with this step."
