"""The entries of `Structure.history`: what made a checkpoint, of which.

Checkpoints and files stand in them by name, so that equal runs give equal bytes anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prunecli import __version__
from prunecli.tensors.hub.names import origin

if TYPE_CHECKING:
    from prunecli.model.checkpoint import Checkpoint


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
    statistics = [{"file": path.name, "sha256": sha256(path.read_bytes()).hexdigest()} for path in files]
    if statistics:
        step["statistics"] = statistics[0] if len(statistics) == 1 else statistics
    return {**step, **notes}


def given(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `arguments` that say something: neither None nor an empty list."""
    return {name: value for name, value in arguments.items() if value not in (None, [])}


def named(checkpoint: Checkpoint) -> dict[str, str]:
    """Which checkpoint it is."""
    return {**origin(checkpoint.path), "fingerprint": checkpoint.fingerprint}
