"""The section of histories: who descends from whom, by which steps."""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from prunecli.model.structure import statistics_files
from prunecli.options import present_name
from prunecli.progress import unsaid
from prunecli.report.collect import CheckpointEntry

Fields = Mapping[str, Any]
"""A step of a history, its source, or its arguments."""
DATA, TEXT, CONFIG = "DATA", "TEXT", "CONFIG"
"""Stand for directories and files that a history does not name: it holds hashes of the text that was read."""

_FACTS = {
    "prune-experts": {"keep", "fit_bytes"},
    "prune-heads": {"removed", "method"},
    "finetune": {"valid", "betas", "best"},
}
"""Command -> arguments that are no options; a comment shows them."""

_OPTIONS = {
    ("finetune", "hidden"): "--hidden-weight",
    ("finetune", "dtype"): "--compute-dtype",
    ("finetune", "part"): "--train",
}
"""Arguments -> options of another name."""

_COUNTED = {
    "experts": "{after:,} of {before:,} experts kept",
    "vocabulary": "{after:,} of {before:,} tokens kept",
}
"""Fields of a step that say what was kept of how much."""

_UNSAID = {"text_sha256", "lines", "sentences", "sha256"}
"""Arguments that say which text was read, and are not options."""

_DIGEST = re.compile("(sha256:)?([0-9a-f]{64})")
_OPTION = re.compile("[a-z][a-z_]*")


@dataclass
class Node:
    """A node of a tree of checkpoints.

    Attributes:
        name: names of the checkpoint.
        how: the command that made it; empty for an original.
        is_here: whether the checkpoint lies in the directory.
        depth: number of steps from the original.
    """

    name: str
    how: str
    is_here: bool
    depth: int


def family_tree(
    derived: Sequence[CheckpointEntry], stock: Sequence[CheckpointEntry], here: set[str]
) -> list[Node]:
    """The originals, and below each what was made from it; checkpoints with equal histories share a node.

    A history is whole, from the original on: its steps are the path to a checkpoint, and those without the last the
    path to what it was made from, whether that still exists or not.
    """
    nodes: dict[tuple[int, ...], Node] = {}  # by the numbers of the original and of the steps from there on
    numbers: dict[str, int] = {}
    for entry in derived:
        key, fingerprint, name = original(entry)
        originals = [other.name for other in stock if fingerprint and other.fingerprint == fingerprint]
        path: tuple[int, ...] = (numbers.setdefault(key, len(numbers)),)
        is_here = any(other in here for other in originals)
        node = nodes.setdefault(path, Node(", ".join(originals) or name, "", is_here, 0))
        # A step's result has the name under which the next step read it.
        names = [step.get("source", {}).get("path", "?") for step in entry.history[1:]]
        for step, name in zip(entry.history, [*names, ""], strict=True):
            key = json.dumps(step, sort_keys=True, default=str)
            path = (*path, numbers.setdefault(key, len(numbers)))
            node = nodes.setdefault(path, Node(name, step_text(step), is_here=False, depth=len(path) - 1))
        node.name, node.is_here = f"{node.name}, {entry.name}" if node.is_here else entry.name, True
    return [nodes[path] for path in sorted(nodes)]


def original(entry: CheckpointEntry) -> tuple[str, str, str]:
    """Return key, fingerprint and name of the model that a history began with."""
    source = entry.history[0].get("source", {})
    if not source:
        return f"from scratch: {entry.fingerprint}", "", "from scratch"
    fingerprint, name = source.get("fingerprint", ""), source.get("path", "?")
    return (fingerprint or f"named {name}"), fingerprint, name


def command_lines(entry: CheckpointEntry, checkpoints: Sequence[CheckpointEntry]) -> list[str]:
    """Each step of a history as a command line for a shell; a comment at its end says what came out.

    The words DATA, TEXT and CONFIG stand for inputs whose paths a history does not hold.

    Args:
        entry: the checkpoint whose history it is.
        checkpoints: those of the directory. A source that is one of them has its path below the directory.
    """
    names = {one.fingerprint: one.name for one in checkpoints}
    sources = [step.get("source", {}) for step in entry.history]
    paths = []  # names below the directory, else `org/name@revision` or the name of a directory
    for source in sources:
        revision = f"@{source['revision']}" if "revision" in source else ""
        own = f"{source.get('path', '')}{revision}"
        paths.append(names.get(source.get("fingerprint", ""), own))
    rows = zip(entry.history, paths, [*paths[1:], entry.name], strict=False)
    lines = []
    for (target, _), group in groupby(rows, key=lambda row: (row[0]["arguments"].get("by shrink"), row[1])):
        steps = [*group]
        if target is None:
            lines += [step_text(step, source=source, output=output) for step, source, output in steps]
            continue
        # One command did them together.
        (step, source, _), (*_, output) = steps[0], steps[-1]
        words = [
            "prunecli",
            "shrink",
            source,
            *str(target).split(),
            *_inputs("shrink", step),
            "--output",
            output,
        ]
        lines.append(f"{shlex.join(words)}  # {', '.join(step['command'] for step, *_ in steps)}")
    return lines


def step_text(step: Fields, *more: str, source: str = "", output: str | None = None) -> str:
    """Command and options of one step of a history, as typed; in a comment what was no option, and `more`.

    Args:
        step: the step.
        more: ends the comment.
        source: the checkpoint that the step read.
        output: the checkpoint that it wrote: the line is for a shell, with the files that the step read.
    """
    command, arguments = step["command"], step["arguments"]
    words = [*filter(None, ("" if output is None else "prunecli", command, source))]
    facts = []
    for name, value in arguments.items():
        is_fact = name in _FACTS.get(command, ())
        if value is None or value is False or value == [] or name in _UNSAID:
            continue
        if command == "prune-layers" and name == "removed":
            layers = [
                f"{side}:{number}" for side, numbers in _mapping(value).items() for number in _many(numbers)
            ]
            if arguments.keys() & {"ratio", "count", "encoder", "decoder"}:
                facts.append(f"removed {', '.join(layers)}")
            else:
                words += ["--remove", ",".join(layers)]
        elif is_fact or not _OPTION.fullmatch(str(name)) or _DIGEST.fullmatch(str(value)):
            facts.append(f"{name} {_value(value)}")
        else:
            words += _option(command, str(name), value)
    if output is not None:
        words += [*_inputs(command, step), "--output", output]
    for name, text in _COUNTED.items():
        counts = _mapping(step.get(name))
        if all(isinstance(counts.get(end), int) for end in ("before", "after")):
            facts.append(text.format(**counts))
    comment = ", ".join((*facts, *more)).replace("\n", " ")
    return shlex.join(words) + (f"  # {comment}" if comment else "")


def _option(command: str, name: str, value: Any) -> list[str]:
    """An argument as words of a command line."""
    option = _OPTIONS.get((command, name)) or present_name(command, f"--{name.replace('_', '-')}", "", unsaid)
    if name == "text":
        text = value if isinstance(value, Mapping) else {"files": value}
        words = [word for file in _many(text.get("files")) for word in (option, str(file))]
        named = {key: text[key] for key in ("split", "pairs") if text.get(key)}
        return words + [word for key, one in named.items() for word in (f"--{key}", _value(one))]
    if name == "from_scratch":
        return [option, CONFIG]
    return [option] if value is True else [option, _value(value)]


def _inputs(command: str, step: Fields) -> list[str]:
    """Options for the files that a step read."""
    arguments = step["arguments"]
    text = _mapping(arguments.get("text"))
    is_ranked = "metric" in arguments if command == "prune-experts" else "method" in arguments
    option = {
        "prune-experts": "--gates" if is_ranked else "--keep",
        "prune-heads": "--scores" if is_ranked else "--keep",
    }.get(command)
    files = statistics_files(step) if option is not None else []
    words = [word for file in files for word in (str(option), str(file.get("file")))]
    if arguments.get("pairs") or arguments.get("split") or arguments.get("langs") or "split" in text:
        return [*words, "--data", DATA]
    if command in ("finetune", "shrink"):
        return [*words, "--labelled" if arguments.get("task") == "classification" else "--text", TEXT]
    return words


def _value(value: Any) -> str:
    if isinstance(value, Mapping) and set(value) == {"encoder", "decoder"}:
        value = [value["encoder"], value["decoder"]]
    if isinstance(value, Mapping):
        value = value.get("path", json.dumps(value, ensure_ascii=False, default=str))
    text = ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    digest = _DIGEST.fullmatch(text)
    return text if digest is None else f"{digest[1] or ''}{digest[2][:8]}…"


def _many(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else () if value is None else (value,)


def _mapping(value: Any) -> Fields:
    return value if isinstance(value, Mapping) else {}
