"""Values and pieces of text that nobody meant, for damage to files."""

import json

import yaml

from prunecli.recipes.engine import bundled_recipes

HOSTILE = (
    *(None, True, False, 0, 1, -1, 2, 3, 7, 255, 1 << 31, 1 << 62, 1 << 63, 1 << 64, -(1 << 63), 10**40),
    *(0.0, 0.5, -1.5, 1e308, 1e-320, float("nan"), float("inf"), -float("inf")),
    *("", " ", "0", "-1", "nan", "x" * 100_000, "\0", "a\0b", "\ud800"),
    *("\ufeff", "é\u0301" * 50, "\u202eabc"),
    *("../../etc/passwd", "/etc/passwd", "..", ".", "a/../../b", "C:\\x"),
    *("\x1b[31mred", "[bold]x[/]", "[/x]", "{layer}"),
    *("model.encoder.layers.0.ffn", "model.decoder.layers.99.ffn", "encoder"),
    *("float8_e4m3fn", "int8", "nllb-moe"),
    *("bert", "gpt2", "t5", "prunecli-llama", "${x}", "%s", "__class__", "relu", "auto"),
    *([], [[]], [0], [0, 0], [-1], [1, "a"], [None], [1 << 70], [[[[[]]]]], ["a", "b"], list(range(64))),
    *(json.loads("[" * 400 + "]" * 400), json.loads('{"a":' * 300 + "1" + "}" * 300)),
    *({}, {"": 0}, {"a": {}}, {"version": 1}, {"version": 99}, {"0": "x", "00": "y"}),
)
"""What a field may hold that nobody meant."""

TEXT_DAMAGE = (
    *("\0", "\ufeff", "\r", "\r\n", "\n\r\n", "\n\n\n", "\t", "\t\t\t", "\x0b\x0c\x1c\x85"),
    *("\u2028", "\u202e\u200b", "\ufffd", "e" + "\u0301" * 3000, "\U0001f600" * 50),
    *("a" * 100_000, "a b " * 25_000),
    *("<s></s><pad><unk>", "eng_Latn</s>", '{"label": 1}\n'),
    *("[bold]x[/bold] [/nothing]", "\x1b]0;title\x07\x1b[2J"),
)
RAW_DAMAGE = (
    *(b"\xff", b"\xfe\xff", b"\xed\xa0\x80", b"\xc0\x80", b"\xf4\x90\x80\x80"),
    *(b"\xe2\x82", b"\x80" * 9),
)


# Recipes that nobody meant well.


RECIPES = (
    "a: &a [x,x,x,x,x,x,x,x,x,x]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b,*b,*b,*b,*b,*b]\n"
    "d: &d [*c,*c,*c,*c,*c,*c,*c,*c,*c]\ne: &e [*d,*d,*d,*d,*d,*d,*d,*d,*d]\nf: &f [*e,*e,*e,*e,*e,*e,*e,*e]\n"
    "g: &g [*f,*f,*f,*f,*f,*f,*f,*f]\nvariables: {x: *g}\nsteps: [{name: a, command: inspect}]\n",
    "&a {steps: *a}\n",
    "variables: &v {x: *v}\nsteps: [{name: a, command: inspect}]\n",
    "variables: {x: '${y}', y: '${x}'}\nsteps: [{name: a, command: inspect}]\n",
    "variables: {x: '${x}'}\nsteps: [{name: '${x}', command: inspect}]\n",
    "variables: {a: 'xxxxxxxxxx', b: '${a}${a}${a}${a}${a}${a}${a}${a}${a}${a}', "
    "c: '${b}${b}${b}${b}${b}${b}${b}${b}${b}${b}',"
    " d: '${c}${c}${c}${c}${c}${c}${c}${c}${c}${c}', e: '${d}${d}${d}${d}${d}${d}${d}${d}${d}${d}',"
    " f: '${e}${e}${e}${e}${e}${e}${e}${e}${e}${e}', g: '${f}${f}${f}${f}${f}${f}${f}${f}${f}${f}',"
    " h: '${g}${g}${g}${g}${g}${g}${g}${g}${g}${g}', i: '${h}${h}${h}${h}${h}${h}${h}${h}${h}${h}',"
    " j: '${i}${i}${i}${i}${i}${i}${i}${i}${i}${i}'}\nsteps: [{name: '${j}', command: inspect}]\n",
    "variables: {a: [0,1,2,3,4,5,6,7,8,9], b: ['${a}','${a}','${a}','${a}','${a}'], c: ['${b}','${b}','${b}','${b}'],"
    " d: ['${c}','${c}','${c}','${c}'], e: ['${d}${c}${b}','${d}x${c}']}\nsteps: [{name: a, command: inspect}]\n",
    "steps:\n- name: '${a}${b}${c}${d}${e}${f}${g}'\n  command: inspect\n  for-each: {a: &l [0,1,2,3,4,5,6,7,8,9],"
    " b: *l, c: *l, d: *l, e: *l, f: *l, g: *l}\n",
    "steps:\n- name: a\n  command: inspect\n  arguments: {checkpoint: 'a\\0b'}\n",
    'steps:\n- name: "\\e[31m\\0"\n  command: "\\0"\n',
    "steps:\n- {name: a, command: run, arguments: {recipe: recipe.yaml}}\n",
    "steps:\n- {name: ../../x, command: prune-experts, arguments: {checkpoint: moe, output: ../../../../etc/x}}\n",
    "steps:\n- {name: a, command: prune-experts, arguments: {checkpoint: moe, output: moe}}\n",
    "steps:\n- {name: a, command: prune-experts, arguments: {checkpoint: moe, output: .}}\n",
    *("!!python/object/apply:os.system ['touch hacked']\n", "steps: !!python/name:os.system\n"),
    *("--- a\n--- b\n", "? [a, b]\n: c\nsteps: []\n", "<<: 5\nsteps: []\n", "<<: [*a]\n"),
    "steps: [{<<: {name: a}, command: inspect}]\n",
    *("{" * 2000, "[" * 2000 + "]" * 2000, "- " * 2000),
    *("steps: !!binary '///'\n", "steps: !!timestamp '9999-99-99'\n", "steps: !!int 'x'\n"),
    *("steps: !!float 'x'\n", "steps: !!set {a, b}\n", "steps: !!omap [a: 1]\n"),
    *("%YAML 9.9\n---\nsteps: []\n", "%TAG ! tag:x,2000:\n---\n!y {}\n"),
    *("1: 2\nsteps: [{name: a, command: inspect}]\n", "null: 2\ntrue: 1\n"),
    "[1, 2]: 3\n",
)
"""Recipes that are bombs, that lead back to themselves, or whose names leave the place."""

SETTINGS = (
    *("", "x", "0", "-1", "1e400", "nan", "[]", "[0.5,0.5]", "[[1]]", "{a:1}", "true", "null", "a,b,a"),
    *("${out}", "../..", "/", "text.txt", "\x1b[31m", "x" * 5000),
)
"""What a variable may be set to."""


def _by_name() -> tuple[str, ...]:
    asked = []
    for name, path in bundled_recipes().items():
        variables = yaml.safe_load(path.read_text()).get("variables", {})
        asked += [
            f"run {name} --dry-run --set {variable}={value}" for variable in variables for value in SETTINGS
        ]
    return *asked, *(f"run {rest}" for rest in ("--list", "quickstart --print", "quickstrat"))


BY_NAME = _by_name()
"""Dry runs of the recipes that come with prunecli, each variable set to what nobody meant."""
