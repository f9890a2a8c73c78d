"""Settings of checkpoints' reductions, without the amount, and names for what differs between several."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from prunecli.model.attention import KINDS
from prunecli.model.structure import statistics_files

AMOUNTS: Mapping[str, frozenset[str]] = {
    "prune-experts": frozenset({"ratio", "keep", "experts_per_layer", "fit_bytes"}),
    "prune-heads": frozenset({"ratio", "count", "removed"}),
    "share-ffn": frozenset({"width"}),
    "prune-ffn": frozenset({"ratio", "width"}),
    "prune-layers": frozenset({"ratio", "count", "encoder", "decoder", "removed"}),
    "factorize-embeddings": frozenset({"map_dim", "expand_dim"}),
    "trim-vocabulary": frozenset({"min_count"}),
    "finetune": frozenset({"best"}),
}
"""Command -> arguments of its step in a history that are amounts or results."""
OUTCOMES = frozenset({"keep", "removed", "best"})
"""Arguments that are results."""

Step = Mapping[str, Any]


@dataclass(frozen=True)
class Value:
    """A value of a step: `identity` decides whether two values are equal, `text` is shown."""

    text: str = field(compare=False)
    identity: str


Setting = Mapping[tuple[int, str], Value]
"""(place in the history, argument) -> value. Steps of one command one after another, with equal arguments, are one."""

COMMANDS = (-1, "")
ORIGIN = (-1, "of")


def setting(history: Sequence[Step], own: Value | None = None) -> Setting:
    """Commands and arguments of a history, without the amount of the last reduction.

    Args:
        history: of a checkpoint, oldest step first.
        own: the checkpoint itself, the origin where the history names none.
    """
    runs: list[tuple[str, dict[str, Value], list[Value]]] = []
    commands = [str(step.get("command", "?")) for step in history]
    last = max((place for place, command in enumerate(commands) if command != "finetune"), default=0)
    while last and commands[last - 1] == commands[last]:
        last -= 1
    for place, (command, step) in enumerate(zip(commands, history, strict=True)):
        values, files = _arguments(step, is_last=place >= last), _statistics(step)
        if runs and runs[-1][:2] == (command, values):
            runs[-1][2].append(files)
        else:
            runs.append((command, values, [files]))
    said = ", ".join(command for command, _, _ in runs)
    found = {COMMANDS: Value(said, said)} if said else {}
    origin = _origin(history) if history else own
    if origin is not None:
        found[ORIGIN] = origin
    for place, (command, values, scored) in enumerate(runs):
        found[place, ""] = Value(command, command)
        found |= {(place, name): value for name, value in values.items()}
        if len(set(scored)) > 1:
            found[place, "statistics"] = Value("of each step", "of each step")
        elif scored[0].identity:
            found[place, "statistics"] = scored[0]
    return found


def names(settings: Sequence[Setting]) -> list[str]:
    """A name for each: what differs between them and nothing else; equal ones have equal names, a single one "".

    What only some say at all is left out where the names differ without it, and so are statistics and texts.
    """
    distinct: list[Setting] = []
    for one in settings:
        if one not in distinct:
            distinct.append(one)
    keys = [key for key in dict.fromkeys(key for one in distinct for key in one) if key == COMMANDS or key[1]]
    keys = [key for key in keys if _differs(key, distinct)]
    for key in reversed(keys):
        fewer = [_name(one, [other for other in keys if other != key], distinct) for one in distinct]
        may_go = key[1] in ("statistics", "text") or any(key not in one for one in distinct)
        if may_go and all(fewer) and len(set(fewer)) == len(fewer):
            keys.remove(key)
    called = [_name(one, keys, distinct) for one in distinct]
    if len(distinct) > 1:
        absent = ", ".join(f"no {key[1].replace('_', ' ')}" for key in keys)
        called = [name or absent for name in called]
    return [called[distinct.index(one)] for one in settings]


def _differs(key: tuple[int, str], settings: Sequence[Setting]) -> bool:
    """Whether those that ran a command at this place say different things; where commands differ, these tell."""
    held = [one for one in settings if key[0] < 0 or (key[0], "") in one]
    return len({one.get(key) for one in held}) > 1


def _name(one: Setting, keys: Sequence[tuple[int, str]], settings: Sequence[Setting]) -> str:
    said = []
    for key in keys:
        if key in one:
            alike = {other[key] for other in settings if key in other and other[key].text == one[key].text}
            digest = one[key].identity.rpartition(":")[2][:8]
            value = one[key].text if len(alike) == 1 else f"{one[key].text} ({digest})"
            said.append(f"{key[1].replace('_', ' ')} {value}".strip())
    return ", ".join(said)


def _arguments(step: Step, *, is_last: bool) -> dict[str, Value]:
    """The settings of a step. The amounts of earlier steps count too: they make another source."""
    arguments, command = step.get("arguments", {}), step.get("command")
    amounts = AMOUNTS.get(str(command), frozenset())
    hidden = amounts if is_last else amounts & OUTCOMES
    if command == "prune-layers" and not arguments.keys() & (amounts - OUTCOMES):
        hidden = frozenset()  # the layers were named
    found = {
        str(name): _value(value)
        for name, value in arguments.items()
        if name not in hidden and value is not None and value is not False and value != []
    }
    stacks = [side for side in ("encoder", "decoder") if arguments.get(side)]
    if command == "prune-layers" and len(stacks) == 1:
        found["side"] = _value(stacks[0])
    if command == "prune-heads":
        kinds = kinds_of(arguments)
        found["attention"] = _value("all" if set(kinds) >= set(KINDS) else kinds)
    counts = arguments.get("experts_per_layer")
    if isinstance(counts, Mapping):
        encoder, decoder = counts.get("encoder"), counts.get("decoder")
        if type(encoder) is int and type(decoder) is int and encoder > 0 and decoder > 0:
            balance = Fraction(encoder, decoder)
            found["balance"] = _value(f"{balance.numerator}:{balance.denominator}")
    return found


def kinds_of(arguments: Mapping[str, Any]) -> tuple[str, ...]:
    """The kinds of attention that a step of `prune-heads` chose among."""
    stated = arguments.get("attention") or KINDS
    return tuple(map(str, stated)) if isinstance(stated, (list, tuple)) else (str(stated),)


def _value(value: Any) -> Value:
    """A path with a fingerprint is told by the path and known by the fingerprint."""
    identity = json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
    if isinstance(value, Mapping):
        files = value.get("files", value.get("pairs"))
        text = ", ".join(map(str, files)) if isinstance(files, list) else str(value.get("path", identity))
        return Value(text, str(value.get("fingerprint", identity)))
    if value is True:
        return Value("", identity)
    text = ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
    return Value(text if len(text) <= 40 else f"{text[:39]}…", identity)


def _statistics(step: Step) -> Value:
    files = statistics_files(step)
    return Value(
        ", ".join(str(file.get("file")) for file in files),
        ", ".join(str(file.get("sha256")) for file in files),
    )


def _origin(history: Sequence[Step]) -> Value | None:
    source = history[0].get("source") if history else None
    if source is None:
        return None
    path = str(source.get("path", "?"))
    return Value(path, str(source.get("fingerprint") or path))
