"""The header of every JSON file of prunecli."""

from __future__ import annotations

import re
from argparse import ArgumentParser
from collections.abc import Iterable, Mapping, Sequence
from textwrap import shorten
from typing import Any

from prunecli import __version__
from prunecli.errors import StatisticsError
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
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(option, dest="values", action="append", nargs="?", default=[], const="")
    found, _ = parser.parse_known_args([*map(str, command)] if isinstance(command, list) else [])
    return list(found.values)


def split_of(payload: Mapping[str, Any]) -> str | None:
    """The split of the text that a document is of."""
    return str(payload["split"]) if "split" in payload else joined(asked(payload, "--split")[-1:])


def joined(splits: Iterable[str | None]) -> str | None:
    """The splits of several documents as one, each once."""
    return " and ".join(dict.fromkeys(split for split in splits if split)) or None


def merged_text(
    parts: Sequence[Any], names: Sequence[str], alike: Sequence[str], remedy: str
) -> dict[str, Any]:
    """Fields of merged statistics that describe their text: `split`, `whole_files` and `mixed` (see `GateStatistics`).

    Args:
        parts: statistics.
        names: names of the statistics for messages.
        alike: attributes that must be equal in all parts.
        remedy: what to do if an attribute is not.

    Raises:
        StatisticsError: an attribute differs.
    """
    for name, part in zip(names, parts, strict=True):
        for attribute in alike:
            one, other = (shorten(repr(getattr(own, attribute)), 40) for own in (parts[0], part))
            if getattr(parts[0], attribute) != getattr(part, attribute):
                raise StatisticsError(
                    f"{names[0]} and {name} cannot be merged: {attribute} is {one} and {other}.", remedy
                )
    forms = {part.whole_files for part in parts}
    return {
        "split": joined(part.split for part in parts),
        "whole_files": parts[0].whole_files if len(forms) == 1 else None,
        "mixed": {True, False} <= forms,
    }


def sizes(checkpoint: Checkpoint) -> dict[str, Any]:
    """The fields of a result that say how big a checkpoint is."""
    return {"parameters": checkpoint.total_parameters, "checkpoint_bytes": checkpoint.total_bytes}
