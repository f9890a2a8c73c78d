"""The recipes that come with prunecli, by name."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path

from prunecli.errors import UsageError

DIRECTORY = Path(__file__).parent / "files"
"""Of the recipes, and of the configurations that they train from random weights."""


def bundled_recipes() -> Mapping[str, Path]:
    """Name -> file."""
    return {path.stem: path for path in sorted(DIRECTORY.glob("*.yaml"))}


def find_recipe(given: str) -> Path:
    """The file of this path, else the recipe of this name.

    Raises:
        UsageError: there is neither; it says what there is.
    """
    known, path = bundled_recipes(), Path(given)
    if path.is_file() or (given not in known and path.suffix in (".yaml", ".yml")):
        return path
    if given in known:
        return known[given]
    near = difflib.get_close_matches(path.stem, known, n=1)
    raise UsageError(
        f"{given}: no such file, and no recipe of this name",
        f"Did you mean {near[0]}?" if near else "prunecli run --list names those that come with it.",
    )
