"""The section of histories: who descends from whom, by which steps."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from prunecli.analysis.settings import AMOUNTS
from prunecli.model.structure import statistics_files
from prunecli.report.collect import CheckpointEntry, ReportData
from prunecli.report.markup import Html, element, join
from prunecli.report.trees import Node, lineage

SHOWN = 160
"""Letters of one argument's value; longer ones (lists of ids, say) are in config.json."""


_FACTS = {
    ("prune-experts", "keep"): "at most {} experts",  # of 0.1.0: the quota, not what was kept
    ("prune-experts", "fit_bytes"): "to fit in {} bytes",
    ("prune-heads", "removed"): "{} heads removed",
    ("prune-heads", "method"): "scores by {}",
    ("finetune", "train"): "text {}",
    ("finetune", "valid"): "validated on {}",
    ("finetune", "betas"): "betas {}",
    ("finetune", "best"): "best at step {}",
}
"""What histories hold beside options, in words."""

_COUNTED = {
    "experts": "{after:,} of {before:,} experts kept",
    "vocabulary": "{after:,} of {before:,} tokens kept",
}
"""Fields of a step that say what was kept of how much."""

_OPTIONS = {("finetune", "hidden"): "--hidden-weight"}
"""Arguments that do not have their option's name."""

_DIGEST = re.compile("(sha256:)?([0-9a-f]{64})")


def history_section(data: ReportData) -> Html | None:
    """The tree of all checkpoints that prunecli made, then the steps of each; None where there are none."""
    derived = [entry for entry in data.checkpoints if entry.history]
    if not derived:
        return None
    stock = [entry for entry in (*data.checkpoints, *data.elsewhere) if not entry.history]
    caption = (
        "What was made from what. A filled dot: a checkpoint of this directory; an empty one: not in it."
    )
    return join(
        [
            lineage(caption, family_tree(derived, stock, {entry.name for entry in data.checkpoints})),
            *(part for entry in derived for part in _steps(entry)),
        ]
    )


def family_tree(
    derived: Sequence[CheckpointEntry], stock: Sequence[CheckpointEntry], here: set[str]
) -> list[Node]:
    """The originals, and below each what was made from it; checkpoints with equal histories share a node.

    A history is whole, from the original on: its steps are the path to a checkpoint, and those without the last the
    path to what it was made from, whether that still exists or not.
    """
    roots: dict[str, Node] = {}
    nodes: dict[tuple[str, ...], Node] = {}  # by the steps from the original on
    steps: dict[int, Mapping[str, Any]] = {}  # id of a node -> the step that made it
    names: dict[int, list[str]] = {}
    for entry in derived:
        key, fingerprint, name = original(entry)
        originals = [other.name for other in stock if fingerprint and other.fingerprint == fingerprint]
        if key not in roots:
            roots[key] = Node(", ".join(originals) or name, "", any(other in here for other in originals))
        node = roots[key]
        path: tuple[str, ...] = (key,)
        for index, step in enumerate(entry.history):
            path = (*path, json.dumps(step, sort_keys=True, default=str))
            if path not in nodes:
                nodes[path] = Node(_result_name(entry.history, index), step_text(step), here=False)
                node.children.append(nodes[path])
                steps[id(nodes[path])] = step
            node = nodes[path]
        names.setdefault(id(node), []).append(entry.name)
        node.name, node.here = ", ".join(names[id(node)]), True
    for parent in (*roots.values(), *nodes.values()):
        for child in parent.children:
            siblings = [steps[id(other)] for other in parent.children if other is not child]
            child.short = step_difference(steps[id(child)], siblings)
    return list(roots.values())


def step_difference(step: Mapping[str, Any], siblings: Sequence[Mapping[str, Any]]) -> str:
    """Of a step what differs from its siblings of the same command; of one alone how much it did."""
    command, arguments = step.get("command", "?"), step.get("arguments", {})
    others = [other for other in siblings if other.get("command", "?") == command]
    amounts = AMOUNTS.get(str(command), frozenset())
    shown = {
        name: value
        for name, value in arguments.items()
        if (
            any(other.get("arguments", {}).get(name) != value for other in others)
            if others
            else name in amounts
        )
    }
    counted = {
        name: step[name]
        for name in _COUNTED
        if name in step and (not shown or any(other.get(name) != step[name] for other in others))
    }
    files = _statistics(step)
    differ = any(_statistics(other) != files for other in others)
    text = step_text({"command": command, "arguments": shown, **counted}, *(files if differ else []))
    return text if text != command or not others else step_text(step)


def original(entry: CheckpointEntry) -> tuple[str, str, str]:
    """Of what a history began with: a key, its fingerprint, its name."""
    source = entry.history[0].get("source", {})
    if not source:
        return f"from scratch: {entry.fingerprint}", "", "from scratch"
    fingerprint, name = str(source.get("fingerprint", "")), str(source.get("path", "?"))
    return (fingerprint or f"named {name}"), fingerprint, name


def _result_name(history: Sequence[Mapping[str, Any]], index: int) -> str:
    """The name that a step's result had when the next step read it."""
    if index + 1 < len(history):
        return str(history[index + 1].get("source", {}).get("path", "?"))
    return "?"


def _steps(entry: CheckpointEntry) -> list[Html]:
    items = [element("li", text) for text in (_origin(entry), *map(step_text, entry.history))]
    files = [text for step in entry.history for text in _statistics(step)]
    note = [element("p", f"Statistics: {', '.join(dict.fromkeys(files))}.", class_="soft")] if files else []
    return [element("h3", entry.name), element("ol", *items, class_="steps", start="0"), *note]


def _origin(entry: CheckpointEntry) -> str:
    _, fingerprint, name = original(entry)
    return f"{name} ({short(fingerprint)})" if fingerprint else name


def short(fingerprint: str) -> str:
    """'sha256:e5549d66…' of a fingerprint or digest."""
    return fingerprint if len(fingerprint) <= 16 else f"{fingerprint[:15]}…"


def step_text(step: Mapping[str, Any], *more: str) -> str:
    """One step of a history as it would be typed; in brackets what was no option, and `more`."""
    command = str(step.get("command", "?"))
    words, facts = [command], []
    for name, value in step.get("arguments", {}).items():
        if (command, name) in _FACTS and value is not None:
            facts.append(
                _FACTS[command, name].format(f"{value:,}" if isinstance(value, int) else _value(value))
            )
        elif value is True:
            words.append(_option(command, name))
        elif value is not None and value is not False:
            words += [_option(command, name), _value(value)]
    for name, text in _COUNTED.items():
        counts = _mapping(step.get(name))
        if all(isinstance(counts.get(end), int) for end in ("before", "after")):
            facts.append(text.format(**counts))
    brackets = ", ".join((*facts, *more))
    return " ".join((*words, f"({brackets})") if brackets else words)


def _option(command: str, name: Any) -> str:
    return _OPTIONS.get((command, name), f"--{str(name).replace('_', '-')}")


def _value(value: Any) -> str:
    if isinstance(value, Mapping) and set(value) == {"encoder", "decoder"}:
        value = [value["encoder"], value["decoder"]]
    if isinstance(value, Mapping):
        value = value.get("path", json.dumps(value, ensure_ascii=False, default=str))
    text = ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
    if digest := _DIGEST.fullmatch(text):
        return f"{digest[1] or ''}{digest[2][:8]}…"
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 1]}…"


def _statistics(step: Mapping[str, Any]) -> list[str]:
    return [f"{file.get('file')} (sha256:{str(file.get('sha256'))[:8]}…)" for file in statistics_files(step)]


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
