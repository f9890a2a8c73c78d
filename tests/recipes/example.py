"""Commands that do nothing, and recipes of them."""

from pathlib import Path

from prunecli.options import Option, Options, argument, option
from prunecli.recipes.engine import read_recipe, resolve


class Made(Options):
    checkpoint: Path | None = argument("", "CHECKPOINT", role="input")
    output: Path | None = option("", role="output")
    force: bool = option("", False)


class Collect(Made):
    data: Path | None = option("", role="input")
    langs: str | None = option("")
    quiet: bool = option("", False)


class Prune(Made):
    gates: tuple[Path, ...] = option("", (), role="input")
    ratio: float | None = option("")
    balance: str | None = option("")
    memory: bool = option("", True, flag="--memory/--no-memory")
    keep_at: tuple[int, ...] = option("", (), beside=".steps")


class Evaluate(Options):
    checkpoints: tuple[Path, ...] = argument("", "CHECKPOINT", ..., role="input")
    output: Path | None = option("", role="output")


def named(options: type[Options]) -> dict[str, Option]:
    """The options by the names that recipes give them."""
    return {name: one for one in options.list_options().values() for name in one.names}


COMMANDS = {"collect": named(Collect), "prune": named(Prune), "evaluate": named(Evaluate)}

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


def resolved(text=RECIPE, **overrides):
    path = Path("recipe.yaml")
    path.write_text(text)
    return resolve(path, read_recipe(path), COMMANDS, overrides, {"base": "base"})
