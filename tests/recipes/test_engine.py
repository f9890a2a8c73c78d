"""Recipes: reading, resolving, and what is up to date."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prunecli.errors import OutputError, UsageError
from prunecli.recipes.engine import Parameter, Step, lies_in, resolve
from prunecli.recipes.run import (
    HASHED_WHOLE_BYTES,
    identity,
    preview,
    read_state,
    run_steps,
    stale_reason,
    state_file,
)
from prunecli.recipes.text import parse_override, read_recipe


def _number(text):
    return None if text.replace(".", "").isdigit() else f"{text!r} is not a number"


COMMANDS = {
    "collect": {
        parameter.name: parameter
        for parameter in (
            Parameter("checkpoint", kind="positional", role="input"),
            Parameter("data", role="input"),
            Parameter("langs"),
            Parameter("output", role="output"),
            Parameter("force", kind="flag"),
            Parameter("quiet", kind="flag"),
        )
    },
    "prune": {
        parameter.name: parameter
        for parameter in (
            Parameter("checkpoint", kind="positional", role="input"),
            Parameter("gates", role="input", multiple=True),
            Parameter("ratio", fault=_number),
            Parameter("balance"),
            Parameter("memory", kind="flag", negative="--no-memory"),
            Parameter("keep-at", beside=".steps"),
            Parameter("output", role="output"),
            Parameter("force", kind="flag"),
        )
    },
    "evaluate": {
        parameter.name: parameter
        for parameter in (
            Parameter("checkpoints", kind="positional", role="input", multiple=True, required=True),
            Parameter("output", role="output"),
        )
    },
}

RECIPE = """\
variables:
  out: made
  ratio: 0.80
  kinds: [language, global]
steps:
  - name: gates
    command: collect
    arguments: {data: text, output: "${out}/gates.json"}
  - name: prune-${kind}
    command: prune
    for-each: {kind: "${kinds}"}
    arguments:
      gates: ["${out}/gates.json"]
      ratio: ${ratio}
      balance: 3:1
      memory: false
      output: ${out}/${kind}
  - name: evaluate
    command: evaluate
    arguments:
      checkpoints: ["${base}", "${out}/language", "${out}/global"]
      output: ${out}/evaluation.json
report:
  title: pruned by ${ratio}
  checkpoints: {full: "${base}", by language: "${out}/language"}
  evaluation: ${out}/evaluation.json
"""


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "val.a").write_text("one\n")
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text("{}")
    return tmp_path


def resolved(workplace, text=RECIPE, **overrides):
    path = workplace / "recipe.yaml"
    path.write_text(text)
    return resolve(path, read_recipe(path), COMMANDS, overrides, {"base": "base"})


def refusal(workplace, text, **overrides):
    with pytest.raises(UsageError) as caught:
        resolved(workplace, text, **overrides)
    return caught.value.message


def test_variables_lists_and_for_each_become_command_lines(workplace):
    recipe = resolved(workplace)
    assert [step.name for step in recipe.steps] == ["gates", "prune-language", "prune-global", "evaluate"]
    assert recipe.steps[0].arguments == ("--data", "text", "--output", "made/gates.json")
    assert recipe.steps[1].arguments == (
        *("--gates", "made/gates.json", "--ratio", "0.80", "--balance", "3:1", "--no-memory"),
        *("--output", "made/language"),
    )
    assert recipe.steps[3].arguments[-4:] == ("--", "base", "made/language", "made/global")
    assert [str(path) for path in recipe.steps[3].inputs] == ["base", "made/language", "made/global"]
    assert recipe.report.title == "pruned by 0.80"
    assert {name: str(path) for name, path in recipe.report.checkpoints.items()} == {
        "full": "base",
        "by language": "made/language",
    }


def test_in_lists_and_rows_a_variable_with_a_list_stands_for_each_of_its_values(workplace):
    text = """\
variables: {kinds: [a, b], sizes: [1, 2], more: ["${kinds}!", c]}
steps:
  - name: make-${kind}-${size}
    command: prune
    for-each: {kind: "${kinds}", size: "${sizes}"}
    arguments: {output: "${kind}-${size}"}
  - name: evaluate
    command: evaluate
    arguments: {checkpoints: ["${base}", "${kinds}-${sizes}"], output: e.json}
  - {name: rest, command: prune, arguments: {balance: "${sizes}", output: "of-${more}"}}
report: {checkpoints: {full: "${base}", "${kinds}, ${sizes}": "${kinds}-${sizes}"}}
"""
    recipe = resolved(workplace, text)
    made = ["a-1", "a-2", "b-1", "b-2"]
    assert [step.name for step in recipe.steps[:-2]] == [f"make-{name}" for name in made]
    assert recipe.steps[-2].arguments == ("--output", "e.json", "--", "base", *made)
    assert recipe.steps[-1].arguments == ("--balance", "1,2", "--output", "of-a!,b!,c")
    rows = {name.replace("-", ", "): name for name in made}
    assert {name: str(path) for name, path in recipe.report.checkpoints.items()} == {"full": "base", **rows}


KEEPING = """\
steps:
  - {name: train, command: prune, arguments: {keep-at: "1,2", output: model}}
  - {name: score, command: prune, arguments: {checkpoint: model.steps/1, output: scores}}
"""


def test_what_an_option_has_written_beside_the_output_is_made_by_the_step(workplace):
    steps = resolved(workplace, KEEPING).steps
    assert [[str(path) for path in step.makes] for step in steps] == [["model", "model.steps"], ["scores"]]
    assert [outcome.reason for outcome in preview(steps, {})] == [
        "model does not exist",
        "model.steps/1 is made anew",
    ]
    message = refusal(workplace, KEEPING.replace('keep-at: "1,2", ', ""))
    assert "step 'score': its input model.steps/1 does not exist, and no step makes it" in message


def test_what_lies_beside_an_output_is_the_commands_own_to_replace(workplace):
    (workplace / "model.steps").mkdir()  # of an interrupted run, which the command goes on with
    replaced = []

    def train(step, replace):
        replaced.append(replace)
        (workplace / "model.steps" / "1").mkdir(parents=True, exist_ok=True)
        step.outputs[0].touch()
        return 0

    def run_again():
        steps = resolved(workplace, KEEPING).steps
        return [outcome.reason for outcome in run_steps(steps, workplace / "state.json", train)]

    assert run_again() == ["model does not exist", "scores does not exist"]
    assert replaced == [False, False]
    assert run_again() == [None, None]
    (workplace / "model.steps" / "1").rmdir()
    (workplace / "model.steps").rmdir()
    assert run_again()[0] == "model.steps does not exist"


@pytest.mark.parametrize(
    ("value", "fault"),
    [("${a}${b}${c}${d}", "more than 1,000 combinations"), ("${a}${b}${c}, ${d}", "more than 1,000 values")],
)
def test_lists_without_end_are_refused(workplace, value, fault):
    ten = "[0, 1, 2, 3, 4, 5, 6, 7, 8, 9]"
    items = ", ".join(f'"{item}"' for item in value.split(", "))
    lists = "".join(f"\n  {name}: {ten}" for name in "abcd")
    text = RECIPE.replace("variables:", f"variables:{lists}\n  all: [{items}]")
    assert f"variables.all: {fault}" in refusal(workplace, text)


def test_set_changes_a_variable_and_what_follows_from_it(workplace):
    recipe = resolved(workplace, RECIPE.replace("out: made", "out: made-${ratio}"), ratio="0.5")
    assert str(recipe.steps[0].outputs[0]) == "made-0.5/gates.json"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a=0.50", ("a", "0.50")),
        ("a=true", ("a", True)),
        ("a=[x, 3:1]", ("a", ["x", "3:1"])),
        ("a=b=c", ("a", "b=c")),
    ],
)
def test_values_of_set(text, expected):
    assert parse_override(text) == expected


@pytest.mark.parametrize("text", ["a", "=1", "a=[1", "a=[{b: 1}]"])
def test_set_without_name_or_value_is_refused(text):
    with pytest.raises(UsageError, match="--set"):
        parse_override(text)


def test_dollar_signs_are_doubled(workplace):
    text = RECIPE.replace("data: text", "langs: 'a$$b$${out}'")
    assert resolved(workplace, text).steps[0].arguments[1] == "a$b${out}"


@given(
    st.floats(0, 1).map(repr)
    | st.sampled_from(["1:30", "no", "on", "0o17", "1_000", "2020-01-01", "=", "1e3"])
)
def test_plain_values_reach_the_command_as_they_are_written(tmp_path_factory, value):
    path = tmp_path_factory.getbasetemp() / "plain.yaml"
    path.write_text(
        f"variables: {{v: {value}}}\nsteps: [{{name: s, command: prune, "
        "arguments: {balance: '${v}', output: o}}]\n"
    )
    assert resolve(path, read_recipe(path), COMMANDS).steps[0].arguments[1] == value


def test_all_faults_are_reported_at_once(workplace):
    text = """\
variables: {a: "${b}", b: "${a}", base: here}
steps:
  - {name: one, command: colect, arguments: {}}
  - name: two
    command: prune
    arguments: {ration: 1, ratio: much, memory: yes, gates: "${nothing}", force: true}
  - {name: three, command: evaluate, arguments: {output: o.json, checkpoints: [later, nowhere]}}
  - {name: three, command: prune, arguments: {output: o.json}}
  - {name: four, command: prune, arguments: {output: later, checkpoint: later}}
report: {checkpoints: {x: gone}}
"""
    message = refusal(workplace, text, rato="1")
    for expected in (
        "--set rato: there is no such variable",
        "variables.base: every recipe has this one already",
        "variables: a, b stand for one another",
        "step 'one': there is no command 'colect'; did you mean 'collect'?",
        "step 'two': prune has no option 'ration'; did you mean 'ratio'?",
        "step 'two', ratio: 'much' is not a number",
        "step 'two', memory: it is a switch: give true or false, not 'yes'",
        "step 'two', gates: there is no variable 'nothing'",
        "step 'two': 'force' is for `prunecli run` to pass, not for a recipe",
        "step 'two': prune needs 'output' here",
        "step 'three': its input later does not exist, and only the later step 'four' makes it",
        "step 'three': its input nowhere does not exist, and no step makes it",
        "step 'three': there are two steps of this name",
        "step 'three': its output o.json is in the way of o.json of step 'three'",
        "step 'four': its output later would replace its input",
        "report: gone does not exist, and no step makes it",
    ):
        assert expected in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "a recipe is a mapping that has `steps`"),
        ("- 1", "a recipe is a mapping that has `steps`"),
        ("steps: []", "steps: "),
        ("steps: [{name: a}]", "steps[1].command: it is missing"),
        ("stepps: []", "stepps: there is no such field"),
        ("steps: [{name: a, command: b, arguments: {c: {d: 1}}}]", "steps[1].arguments.c: give text"),
        ("steps: [{name: a, command: b, arguments: {c: }}]", "steps[1].arguments.c: give text"),
        ("steps:\n  - a: [", "line 2: this is not YAML"),
        ("steps: [{name: a, name: b}]", "'name' is given twice"),
        ("a: !!python/object:os.system x", "this is not YAML"),
    ],
)
def test_files_that_are_no_recipe_are_refused(workplace, text, expected):
    assert expected in refusal(workplace, text)


def test_a_missing_recipe_is_refused(workplace):
    with pytest.raises(UsageError, match=r"nowhere\.yaml: no such file\nGive the path of a recipe"):
        read_recipe(workplace / "nowhere.yaml")


def test_a_directory_is_no_recipe(workplace):
    with pytest.raises(UsageError, match=r"a directory, not a recipe\nGive the path of a recipe"):
        read_recipe(workplace)


def test_a_missing_input_is_said_once_with_the_variable_that_names_it(workplace):
    text = """\
variables: {data: flores, other: flores, one: x}
steps:
  - {name: a, command: collect, arguments: {data: "${data}", output: a.json}}
  - {name: b, command: collect, arguments: {data: "${data}", output: b.json}}
"""
    message = refusal(workplace, text)
    assert message.count("flores does not exist") == 1
    assert "steps 'a' and 'b': their input flores does not exist, and no step makes it" in message
    assert "--set data=… or --set other=… names another" in message


def test_outputs_within_one_another_are_refused(workplace):
    text = RECIPE.replace("${out}/evaluation.json", "${out}/language/evaluation.json")
    assert "is in the way of made/language of step 'prune-language'" in refusal(workplace, text)


@pytest.mark.parametrize(
    ("path", "directory", "expected"),
    [("a/b", "a", True), ("a", "a/", True), ("ab", "a", False), ("a/../b", "a", False), ("/", "/", True)],
)
def test_lies_in_compares_whole_names(path, directory, expected):
    assert lies_in(path, directory) is expected


class Worker:
    """Writes each step's outputs; remembers what it ran."""

    def __init__(self, fail=()):
        self.ran, self.replaced, self.fail = [], [], fail

    def __call__(self, step, replace):
        self.ran.append(step.name)
        self.replaced += [step.name] if replace else []
        if step.name in self.fail:
            return 3
        for output in step.outputs:
            output.write_text(" ".join(step.arguments))
        return 0


def run(workplace, worker=None, force=False, **overrides):
    worker = Worker() if worker is None else worker
    recipe = resolved(workplace, **overrides)
    outcomes = run_steps(recipe.steps, state_file(workplace / "recipe.yaml", workplace), worker, force=force)
    return worker, outcomes


def test_a_second_run_does_nothing(workplace):
    worker, outcomes = run(workplace)
    assert worker.ran == ["gates", "prune-language", "prune-global", "evaluate"]
    assert worker.replaced == []
    again, outcomes = run(workplace)
    assert again.ran == []
    assert [outcome.reason for outcome in outcomes] == [None] * 4


def test_a_changed_argument_runs_its_step_and_those_after_it(workplace):
    run(workplace)
    worker, outcomes = run(workplace, ratio="0.5")
    assert worker.ran == worker.replaced == ["prune-language", "prune-global", "evaluate"]
    assert outcomes[1].reason == "its arguments or the version of prunecli changed"
    assert outcomes[-1].reason == "made/language, made/global changed"


def test_a_changed_input_runs_what_reads_it_and_stops_where_the_output_is_the_same(workplace):
    run(workplace)
    (workplace / "text" / "val.a").write_text("two\n")
    worker, outcomes = run(workplace)
    assert worker.ran == ["gates"]
    assert outcomes[0].reason == "text changed"


def test_a_touched_input_changes_nothing(workplace):
    run(workplace)
    os.utime(workplace / "text" / "val.a", (1, 1))
    assert run(workplace)[0].ran == []


def test_a_lost_output_is_made_again(workplace):
    run(workplace)
    (workplace / "made" / "global").unlink()
    assert run(workplace)[0].ran == ["prune-global"]


def test_a_new_version_runs_everything(workplace, monkeypatch):
    run(workplace)
    monkeypatch.setattr("prunecli.recipes.run.__version__", "99")
    assert len(run(workplace)[0].ran) == 4


def test_force_runs_everything(workplace):
    run(workplace)
    worker, outcomes = run(workplace, force=True)
    assert len(worker.ran) == len(worker.replaced) == 4
    assert outcomes[0].reason == "--force"


def test_outputs_of_others_are_refused_before_any_step(workplace):
    (workplace / "made").mkdir()
    (workplace / "made" / "evaluation.json").write_text("mine")
    worker = Worker()
    with pytest.raises(OutputError, match=r"evaluation.json exists, and was not made by"):
        run(workplace, worker)
    assert worker.ran == []
    assert run(workplace, worker, force=True)[1][-1].status == 0


def test_outputs_that_were_changed_by_hand_are_refused(workplace):
    run(workplace)
    (workplace / "made" / "global").write_text("mended by hand")
    with pytest.raises(OutputError, match="made/global changed after this recipe's step 'prune-global'"):
        run(workplace)


def test_a_failure_stops_the_run_and_the_next_run_goes_on_there(workplace):
    worker, outcomes = run(workplace, Worker(fail=["prune-global"]))
    assert (outcomes[-1].step.name, outcomes[-1].status) == ("prune-global", 3)
    assert "evaluate" not in worker.ran
    assert run(workplace)[0].ran == ["prune-global", "evaluate"]


def test_a_step_that_writes_nothing_is_an_error(workplace):
    with pytest.raises(OutputError, match="step 'gates' ended well but did not write made"):
        run(workplace, lambda step, replace: 0)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": "prunecli.run/1", "steps": {"a": 1}}'])
def test_a_damaged_state_is_as_good_as_none(workplace, text):
    path = workplace / "state.json"
    path.write_text(text)
    assert read_state(path) == {}


def test_a_preview_says_what_follows_from_what(workplace):
    recipe = resolved(workplace)
    assert [outcome.reason for outcome in preview(recipe.steps, {})] == [
        "made/gates.json does not exist",
        "made/gates.json is made anew",
        "made/gates.json is made anew",
        "made/language is made anew",
    ]
    run(workplace)
    state = read_state(state_file(workplace / "recipe.yaml", workplace))
    assert [outcome.reason for outcome in preview(recipe.steps, state)] == [None] * 4
    assert {outcome.reason for outcome in preview(recipe.steps, state, force=True)} == {"--force"}


def test_steps_without_output_always_run():
    assert stale_reason(Step("a", "inspect", ()), {}) == "it writes no file"


def test_identity_follows_names_and_content_but_not_hidden_or_excluded_files(workplace):
    base = workplace / "base"
    first = identity(base)
    (base / ".cache").write_text("x")
    assert identity(base) == first
    (base / "out.json").write_text("x")
    assert identity(base) != first
    assert identity(base, exclude=[base / "out.json"]) == first
    (base / "out.json").rename(base / "config2.json")
    renamed = identity(base)
    (base / "config2.json").write_text("y")
    assert identity(base) != renamed
    assert identity(workplace / "nothing") is None


def test_large_files_of_a_directory_are_told_apart_by_size_and_time(workplace):
    weights = workplace / "base" / "model.safetensors"
    with weights.open("wb") as file:
        file.truncate(HASHED_WHOLE_BYTES + 1)
    os.utime(weights, (1, 1))
    first = identity(workplace / "base")
    os.utime(weights, (2, 2))
    assert identity(workplace / "base") != first
