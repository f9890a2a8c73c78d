"""The entries of `Structure.history`: what made a checkpoint, of which.

Checkpoints and files stand in them by name, so that equal runs give equal bytes anywhere.
"""

from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from prunecli import __version__
from prunecli.model.checkpoint import Checkpoint, open_model
from prunecli.model.structure import KEY
from prunecli.tensors.hub.names import origin
from prunecli.tensors.json_files import lenient, read_object


def history_step(
    command: str,
    source: Checkpoint | None,
    arguments: Mapping[str, Any],
    files: Sequence[Path] = (),
    **notes: Any,
) -> dict[str, Any]:
    """One entry.

    Args:
        command: "prune-experts".
        source: what it was made of; None: of random weights.
        arguments: what the result depends on.
        files: of statistics.
        notes: further fields, a method's own.
    """
    step: dict[str, Any] = {"command": command, "arguments": dict(arguments), "prunecli": __version__}
    if source is not None:
        step["source"] = named(source)
        parameters = sum(info.numel for info in source.unquantised.values())
        step["before"] = {"parameters": parameters, "bytes": source.total_bytes}
    statistics = [{"file": path.name, "sha256": sha256(path.read_bytes()).hexdigest()} for path in files]
    if statistics:
        step["statistics"] = statistics[0] if len(statistics) == 1 else statistics
    return {**step, **notes}


def given(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that are neither None nor an empty list."""
    return {name: value for name, value in arguments.items() if value not in (None, [])}


def named(checkpoint: Checkpoint) -> dict[str, str]:
    """Which checkpoint it is."""
    return {**origin(checkpoint.path), "fingerprint": checkpoint.fingerprint}


def written_checkpoints(directory: Path) -> list[Path]:
    """The checkpoints that prunecli wrote in `directory` (not below), by name."""
    configs = {path.parent: lenient(read_object)(path) for path in directory.glob("*/config.json")}
    return sorted(path for path, config in configs.items() if config and KEY in config)


def made_from(path: Path, origin: Path) -> bool:
    """Whether the checkpoint `path` is `origin` or was made from it, by its config.json and the history in it."""
    sources = [source for step in _steps(path) or () if isinstance(source := step.get("source"), Mapping)]
    if not sources:
        config = lenient(read_object)(path / "config.json") or {}
        return {**config, KEY: None} == {**read_object(origin / "config.json"), KEY: None}
    fingerprint = open_model(origin).fingerprint
    return any(source.get("fingerprint") == fingerprint for source in sources)


def pruned_pairs(
    checkpoints: Sequence[Path], pairs: Sequence[tuple[str, str]]
) -> tuple[tuple[str, str], ...]:
    """Return the pairs (source, target) that all checkpoints pruned for certain languages were pruned for.

    All pairs if there is no such pair.
    """
    return pairs_of_steps([step for path in checkpoints for step in _steps(path) or ()], pairs)


def pairs_of_steps(
    steps: Sequence[Mapping[str, Any]], pairs: Sequence[tuple[str, str]]
) -> tuple[tuple[str, str], ...]:
    """Return the pairs (source, target) that the steps of a history chose; all pairs if no pair is left."""
    kept = list(pairs)
    for step in steps:
        arguments = step.get("arguments")
        if isinstance(arguments, Mapping):
            sources, targets = _names(arguments.get("source")), _names(arguments.get("target"))
            kept = [p for p in kept if p[0] in (sources or (p[0],)) and p[1] in (targets or (p[1],))]
    return tuple(kept or pairs)


def _names(value: Any) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, list) else ()


@lenient
def _steps(path: Path) -> list[Mapping[str, Any]]:
    history = read_object(path / "config.json")[KEY]["history"]
    return [step for step in history if isinstance(step, Mapping)]
