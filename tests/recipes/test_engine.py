import pytest
from hypothesis import given
from hypothesis import strategies as st

from prunecli.commands.command import parameters
from prunecli.errors import UsageError
from prunecli.recipes.engine import parse_override, read_recipe, resolve
from tests.recipes.example import COMMANDS, KEEPING, RECIPE, resolved


def refusal(text, **overrides):
    with pytest.raises(UsageError) as caught:
        resolved(text, **overrides)
    return caught.value.message


def test_variables_lists_and_for_each_become_command_lines():
    steps = resolved()
    assert [step.name for step in steps] == ["gates", "prune-language", "prune-global", "evaluate"]
    assert steps[0].arguments == ("--data", "text", "--output", "made/gates.json")
    assert steps[1].arguments == (
        *("--gates", "made/gates.json", "--ratio", "0.80", "--balance", "3:1", "--no-memory"),
        *("--output", "made/language"),
    )
    assert steps[3].arguments[-4:] == ("--", "base", "made/language", "made/global")
    assert [str(path) for path in steps[3].inputs] == ["base", "made/language", "made/global"]


def test_a_home_directory_is_expanded_in_paths(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    steps = resolved(RECIPE.replace("{data: text,", "{data: ~/text, langs: ~/a,"), out="~/made")
    expected = ("--data", f"{tmp_path}/text", "--langs", "~/a", "--output", f"{tmp_path}/made/gates.json")
    assert steps[0].arguments == expected


def test_in_lists_a_variable_with_a_list_stands_for_each_of_its_values():
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
"""
    steps = resolved(text)
    made = ["a-1", "a-2", "b-1", "b-2"]
    assert [step.name for step in steps[:-2]] == [f"make-{name}" for name in made]
    assert steps[-2].arguments == ("--output", "e.json", "--", "base", *made)
    assert steps[-1].arguments == ("--balance", "1,2", "--output", "of-a!,b!,c")


WHEN = """\
variables: {start: "${out}/own", out: made, kind: one}
steps:
  - {name: train, command: prune, when: {start: "${out}/own"}, arguments: {output: "${out}/own"}}
  - {name: shrink, command: collect, when: {kind: [one, two]}, arguments: {data: "${start}", output: small}}
  - {name: other, command: collect, when: {kind: three}, arguments: {data: "${start}", output: small}}
"""


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        ({}, ["train", "shrink"]),
        ({"start": "base", "kind": "three"}, ["other"]),
        ({"start": "base", "kind": "four"}, []),
    ],
)
def test_a_step_may_depend_on_the_value_of_a_variable(overrides, names):
    if names:
        assert [step.name for step in resolved(WHEN, **overrides)] == names
    else:
        assert "no step is left" in refusal(WHEN, **overrides)


def test_what_an_option_has_written_beside_the_output_is_made_by_the_step():
    steps = resolved(KEEPING)
    assert [[str(path) for path in step.makes] for step in steps] == [["model", "model.steps"], ["scores"]]
    message = refusal(KEEPING.replace('keep-at: "1,2", ', ""))
    assert "step 'score': its input model.steps/1 does not exist, and no earlier step makes it" in message


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
    assert resolve(path, read_recipe(path), COMMANDS)[0].arguments[1] == value


def test_old_names_of_options(tmp_path):
    path, lines = tmp_path / "old.yaml", []
    path.write_text("steps: [{name: s, command: prune-ffn, arguments: {round-to: 8, output: o}}]\n")
    step = resolve(path, read_recipe(path), parameters(), say=lines.append)[0]
    assert step.arguments == ("--multiple-of", "8", "--output", "o")
    assert lines == ["--round-to is called --multiple-of now."]


@pytest.mark.parametrize(
    ("value", "fault"),
    [("${a}${b}${c}${d}", "more than 1,000 combinations"), ("${a}${b}${c}, ${d}", "more than 1,000 values")],
)
def test_lists_without_end_are_refused(value, fault):
    ten = "[0, 1, 2, 3, 4, 5, 6, 7, 8, 9]"
    items = ", ".join(f'"{item}"' for item in value.split(", "))
    lists = "".join(f"\n  {name}: {ten}" for name in "abcd")
    text = RECIPE.replace("variables:", f"variables:{lists}\n  all: [{items}]")
    assert f"variables.all: {fault}" in refusal(text)


def test_all_faults_are_reported_at_once():
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
"""
    message = refusal(text, rato="1")
    for expected in (
        "`assignments=rato`: there is no such variable",
        "variables.base: every recipe has this one already",
        "variables: a, b stand for one another",
        "step 'one': there is no command 'colect' (Did you mean collect?)",
        "step 'two': prune has no option 'ration' (Did you mean ratio?)",
        "step 'two', ratio: must be a valid number",
        "step 'two', memory: it is a switch: give true or false, not 'yes'",
        "step 'two', gates: there is no variable 'nothing'",
        "step 'two': 'force' is for `prunecli run` to pass, not for a recipe",
        "step 'two': prune needs 'output' here",
        "step 'three': its input later does not exist, and no earlier step makes it",
        "step 'three': its input nowhere does not exist, and no earlier step makes it",
        "step 'three': there are two steps of this name",
        "step 'three': its output o.json is in the way of o.json of step 'three'",
        "step 'four': its output later would replace its input",
    ):
        assert expected in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "a recipe is a mapping that has `steps`"),
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
def test_files_that_are_no_recipe_are_refused(text, expected):
    assert expected in refusal(text)


def test_a_missing_input_is_said_once_with_the_variable_that_names_it():
    text = """\
variables: {data: flores, other: flores, one: x}
steps:
  - {name: a, command: collect, arguments: {data: "${data}", output: a.json}}
  - {name: b, command: collect, arguments: {data: "${data}", output: b.json}}
"""
    message = refusal(text)
    assert message.count("flores does not exist") == 1
    assert "step 'a': its input flores does not exist, and no earlier step makes it" in message
    assert "`assignments=data=…` or `assignments=other=…` names another" in message


def test_outputs_within_one_another_are_refused():
    text = RECIPE.replace("${out}/evaluation.json", "${out}/language/evaluation.json")
    assert "is in the way of made/language of step 'prune-language'" in refusal(text)


def test_dollar_signs_are_doubled():
    text = RECIPE.replace("data: text", "langs: 'a$$b$${out}'")
    assert resolved(text)[0].arguments[1] == "a$b${out}"


def test_a_condition_on_an_unknown_variable_is_a_fault():
    text = WHEN.replace("{kind: three}", "{kinds: three}")
    assert "steps[3].when: there is no variable 'kinds' (Did you mean kind?)" in refusal(text)


@pytest.mark.parametrize("text", ["a", "=1", "a=[1", "a=[{b: 1}]"])
def test_set_without_name_or_value_is_refused(text):
    with pytest.raises(UsageError, match="assignments="):
        parse_override(text)
