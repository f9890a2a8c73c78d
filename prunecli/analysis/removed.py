"""How checkpoints were reduced, for charts: the fraction removed, the settings that differ, and lines of checkpoints
that were reduced alike.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from operator import itemgetter
from typing import Any, Literal

from prunecli.model.axes import Kind
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.parts import KINDS
from prunecli.model.structure import statistics_files
from prunecli.tensors.hub.names import origin


@dataclass(frozen=True)
class Removed:
    """Fraction that was removed from one checkpoint, and its lines in a chart.

    Attributes:
        fraction: in [0, 1]: 1 - kept / original.
        lines: those that it is a point of: of a reduced checkpoint the one of all that were reduced in the same way,
            from the same model; of an original those of what was made from it. A line is named by what differs between
            the lines, "" where there is one.
        is_original: whether curves start from it.
    """

    fraction: float
    lines: tuple[str, ...]
    is_original: bool = False


Unit = Literal["heads", "experts", "parameters"]
Step = Mapping[str, Any]
"""A step of a history."""


def removed(checkpoints: Sequence[Checkpoint], whole: int | None = None) -> tuple[Unit, list[Removed]]:
    """Unit that was removed from the checkpoints, and the fraction removed from each.

    Heads where all were reduced by `prune-heads` alone, else experts where all were by `prune-experts` alone, else
    parameters, which are counted against `whole`, by default those of the first checkpoint's original. Where the last
    pruning of heads was of some attentions only (1905.10650, section 5), the fraction is of the heads of these.
    """
    commands = _commands(checkpoints)
    kinds: tuple[tuple[Unit, Kind], ...] = (("heads", "head"), ("experts", "expert"))
    for unit, kind in kinds:
        if commands <= {f"prune-{unit}"} and any(one.structure.of_kind(kind) for one in checkpoints):
            return unit, _in_lines(checkpoints, [_share(one, kind) for one in checkpoints])
    sizes = [one.total_parameters for one in checkpoints]
    whole = whole or (checkpoints[0].structure.original_size or sizes)[0]
    return "parameters", _in_lines(checkpoints, [1 - size / whole for size in sizes])


def _commands(checkpoints: Iterable[Checkpoint]) -> set[str]:
    """The commands that reduced the checkpoints."""
    return {step["command"] for one in checkpoints for step in one.structure.history} - {"finetune"}


def _in_lines(checkpoints: Sequence[Checkpoint], fractions: Sequence[float]) -> list[Removed]:
    """Assign checkpoints that were reduced in the same way to one line."""
    count = range(len(checkpoints))
    made = {
        at: [other for other in count if is_made_from(checkpoints[other], one)]
        for at, one in enumerate(checkpoints)
        if one.structure.is_stock and not _commands([one])
    }
    members = [at for at in count if not made.get(at)]
    if not any(fractions[at] or checkpoints[at].structure.history for at in members):
        return [Removed(fraction, ("",), is_original=True) for fraction in fractions]
    settings = [
        setting(one.structure.history, f"{origin(one.path)['path']} ({_short(one.fingerprint)})")
        for one in (checkpoints[at] for at in members)
    ]
    named = dict(zip(members, names(settings), strict=True))
    found = []
    for at, fraction in enumerate(fractions):
        lines = dict.fromkeys(named[other] for other in made.get(at) or [at] if other in named)
        found.append(Removed(fraction, tuple(lines), is_original=at not in named))
    return found


def is_made_from(one: Checkpoint, other: Checkpoint) -> bool:
    """Whether the history of `one` begins with that of `other`, or with `other` itself."""
    history, earlier = one.structure.history, other.structure.history
    if earlier:
        return len(earlier) < len(history) and history[: len(earlier)] == earlier
    if not history:
        return False
    source = history[0].get("source")
    return source is None or source.get("fingerprint") == other.fingerprint


def _share(checkpoint: Checkpoint, kind: Kind) -> float:
    """Fraction of the heads or experts that was removed."""
    if not checkpoint.structure.of_kind(kind):
        return 0.0
    if kind == "head":
        steps = [one for one in checkpoint.structure.history if one["command"] == "prune-heads"]
        kinds = kinds_of(steps[-1]["arguments"] if steps else {})
        layers = checkpoint.layout.attentions
        chosen = [layer for layer in layers if layer.kind in kinds] or layers
        counts = [(layer.count, layer.original_heads) for layer in chosen]
    else:
        counts = [(layer.num_experts, layer.original_experts) for layer in checkpoint.require_mixtures()]
    kept, whole = map(sum, zip(*counts, strict=True))
    return 1 - kept / whole


def steps_of_one_training(
    checkpoints: Sequence[Checkpoint], removed: Sequence[float]
) -> list[tuple[int, int]] | None:
    """The step of each checkpoint, if one training wrote all of them, or the models that they were reduced from.

    Args:
        removed: fraction that each has lost.

    Returns:
        Updates of the weights that its original had seen, and index of the original that it was made from: its own of a
        checkpoint that the training wrote. None where they were not, or where two of one step have lost the same
        fraction: a line would have two values.
    """
    histories = [checkpoint.structure.history for checkpoint in checkpoints]
    originals = []
    for index, one in enumerate(checkpoints):
        sources = [other for other, model in enumerate(checkpoints) if is_made_from(one, model)]
        originals.append(max(sources, key=lambda other: len(histories[other]), default=index))
    starts = sorted(set(originals))
    trainings = [_training(histories[start]) for start in starts]
    steps = [_updates(histories[original]) for original in originals]
    if trainings[0] is None or any(training != trainings[0] for training in trainings):
        return None
    places = {(step, round(share, 3)) for step, share in zip(steps, removed, strict=True)}
    is_one = len(set(steps)) > 1 and len(starts) < len(checkpoints) and len(places) == len(steps)
    return [*zip(steps, originals, strict=True)] if is_one else None


def _training(history: Sequence[Step]) -> object | None:
    """Value that is equal for all checkpoints of one training; None if the last step is no training."""
    if not history or history[-1]["command"] != "finetune" or not _updates(history):
        return None
    arguments = {k: v for k, v in history[-1]["arguments"].items() if k not in ("steps", "best")}
    return [*history[:-1], {**history[-1], "arguments": arguments}]


def _updates(history: Sequence[Step]) -> int:
    steps = history[-1]["arguments"].get("steps") if history else None
    return steps if type(steps) is int and steps > 0 else 0


AMOUNTS = {
    "prune-experts": {"ratio", "keep", "experts_per_layer", "fit_bytes"},
    "prune-heads": {"ratio", "count", "removed"},
    "share-ffn": {"width"},
    "prune-ffn": {"ratio", "width"},
    "prune-layers": {"ratio", "count", "encoder", "decoder", "removed"},
    "factorize-embeddings": {"map_dim", "expand_dim"},
    "trim-vocabulary": {"min_count"},
    "finetune": {"best"},
}
"""Command -> arguments of its step in a history that are amounts or results."""
OUTCOMES = {"keep", "removed", "best"}
"""Arguments that are results."""

Setting = Mapping[tuple[str, str], str]
"""(place in the history and command, argument) -> text. Steps of one command one after another, with equal arguments,
are one."""


def setting(history: Sequence[Step], own: str = "") -> Setting:
    """Commands and arguments of a history, without the amount of the last reduction.

    Args:
        history: steps of a checkpoint, oldest first.
        own: name of the checkpoint itself, which is the origin if the history is empty.
    """
    commands = [step["command"] for step in history]
    last = max((place for place, command in enumerate(commands) if command != "finetune"), default=0)
    while last and commands[last - 1] == commands[last]:
        last -= 1
    rows = []
    for place, step in enumerate(history):
        files = (f"{one.get('file')} ({_short(one.get('sha256'))})" for one in statistics_files(step))
        rows.append(((commands[place], _arguments(step, is_last=place >= last)), ", ".join(files)))
    runs = [(*key, {files for _, files in own}) for key, own in groupby(rows, key=itemgetter(0))]
    if history:
        source = history[0].get("source")
        own = f"{source.get('path', '?')} ({_short(source.get('fingerprint'))})" if source else ""
    found = {("", ""): ", ".join(command for command, _, _ in runs), ("", "of"): own}
    for place, (command, values, files) in enumerate(runs):
        own_values = {**values, "statistics": files.pop() if len(files) == 1 else "of each step"}
        found |= {(f"{place} {command}", name): text for name, text in own_values.items()}
    return {key: text for key, text in found.items() if text}


def names(settings: Sequence[Setting]) -> list[str]:
    """A name for each setting: the values that differ between them; equal settings have equal names, a single one "".

    Values that only some settings state, statistics and text are named if the other values do not tell settings apart.
    """
    distinct = [one for place, one in enumerate(settings) if one not in settings[:place]]

    def named(keys: Sequence[tuple[str, str]]) -> list[str]:
        return [
            ", ".join(f"{_words(key)} {one[key]}".strip() for key in keys if key in one) for one in distinct
        ]

    differing = [
        key for key in dict.fromkeys(chain(*distinct)) if len({one.get(key) for one in distinct}) > 1
    ]
    chosen = [
        key
        for key in differing
        if key[1] not in ("statistics", "text") and all(key in one for one in distinct)
    ]
    for key in differing:
        if len(set(named([*chosen, key]))) > len(set(named(chosen))):
            chosen.append(key)
    absent = ", ".join(f"no {_words(key)}" for key in chosen)
    found = [name or absent for name in named(chosen)]
    return [found[distinct.index(one)] for one in settings]


def _words(key: tuple[str, str]) -> str:
    return key[1].replace("_", " ")


def _short(digest: Any) -> str:
    """The first digits of a digest such as "sha256:0123…"."""
    return str(digest).rpartition(":")[2][:8]


def _arguments(step: Step, *, is_last: bool) -> dict[str, str]:
    """The settings of a step. The amounts of earlier steps count too: they make another source."""
    arguments, command = step["arguments"], step["command"]
    amounts = AMOUNTS.get(command, set[str]())
    hidden = amounts if is_last else amounts & OUTCOMES
    if command == "prune-layers" and not arguments.keys() & (amounts - OUTCOMES):
        hidden = set()  # the layers were named
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
    return found


def kinds_of(arguments: Mapping[str, Any]) -> tuple[str, ...]:
    """The kinds of attention that a step of `prune-heads` chose among."""
    stated = arguments.get("attention") or KINDS
    return tuple(map(str, stated)) if isinstance(stated, list | tuple) else (str(stated),)


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        files = value.get("files", value.get("pairs", value.get("path")))
        digest = value.get("fingerprint", value.get("sha256"))
        if files is not None:
            return f"{_value(files)} ({_short(digest)})" if digest else _value(files)
        return json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
    text = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return "" if value is True else text if len(text) <= 40 else f"{text[:39]}…"
