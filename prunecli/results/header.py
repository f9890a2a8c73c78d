"""What every JSON file of prunecli begins with."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from prunecli import __version__
from prunecli.model.checkpoint import Checkpoint
from prunecli.processes import COMMAND
from prunecli.tensors.hub.names import origin

_SECRET = re.compile(r"(?<=://)[^/@\s]+(?=@)|\bhf_\w{8,}")
"""A user's name and password in an address; a token of the hub."""


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
        "command": [_SECRET.sub("***", word) for word in COMMAND.get()],
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


def asked(payload: Mapping[str, Any], option: str) -> list[str]:
    """The values that the command line of a document gave an option: `--split dev` or `--split=dev`.

    Documents of prunecli 0.2.0 and before have no field for their text: the command line alone names the text.
    """
    command = payload.get("command")
    words = [str(word) for word in command] if isinstance(command, list) else []
    given = [(*word.partition("="), after) for word, after in zip(words, [*words, ""][1:], strict=True)]
    return [own if equals else after for name, equals, own, after in given if name == option]


def split_of(payload: Mapping[str, Any]) -> str | None:
    """The split of the text that a document is of."""
    return str(payload["split"]) if "split" in payload else joined(asked(payload, "--split")[-1:])


def joined(splits: Iterable[str | None]) -> str | None:
    """The splits of several documents as one, each once."""
    return " and ".join(dict.fromkeys(split for split in splits if split)) or None


def sizes(checkpoint: Checkpoint) -> dict[str, Any]:
    """The fields of a result that say how big a checkpoint is."""
    return {"parameters": checkpoint.total_parameters, "checkpoint_bytes": checkpoint.total_bytes}
