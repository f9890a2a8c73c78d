"""Commands that do nothing, and recipes of them."""

from __future__ import annotations

from prunecli.recipes.engine import Parameter, resolve
from prunecli.recipes.text import read_recipe


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

KEEPING = """\
steps:
  - {name: train, command: prune, arguments: {keep-at: "1,2", output: model}}
  - {name: score, command: prune, arguments: {checkpoint: model.steps/1, output: scores}}
"""


def resolved(workplace, text=RECIPE, **overrides):
    path = workplace / "recipe.yaml"
    path.write_text(text)
    return resolve(path, read_recipe(path), COMMANDS, overrides, {"base": "base"})
