"""What every JSON file of prunecli begins with."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from prunecli import __version__
from prunecli.model.checkpoint import Checkpoint
from prunecli.tensors.hub.names import origin


def header(
    format: str,  # noqa: A002 (the key's name)
    checkpoints: Sequence[Checkpoint],
    seed: int | None,
) -> dict[str, Any]:
    """The fields that every document begins with.

    Args:
        format: "prunecli.NAME/VERSION".
        checkpoints: the models that it speaks of.
        seed: of everything random, or None where nothing is.
    """
    return {
        "format": format,
        "prunecli": __version__,
        "command": ["prunecli", *sys.argv[1:]],
        "models": [
            {
                **origin(made.path),
                **({"fingerprint": made.fingerprint} if made.is_local else {}),
                "model_type": made.model_type,
            }
            for made in checkpoints
        ],
        "seed": seed,
    }


def asked(payload: Mapping[str, Any], option: str) -> str | None:
    """What the command line of a document gave an option: `--split dev` or `--split=dev`; None: it did not."""
    command = payload.get("command")
    words = [str(word) for word in command] if isinstance(command, list) else []
    for word, following in zip(words, [*words, ""][1:], strict=True):
        if word == option or word.startswith(f"{option}="):
            return (following if word == option else word.partition("=")[2]) or None
    return None


def sizes(checkpoint: Checkpoint) -> dict[str, Any]:
    """The fields of a result that say how big a checkpoint is."""
    return {"parameters": checkpoint.total_parameters, "checkpoint_bytes": checkpoint.total_bytes}
