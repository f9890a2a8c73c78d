"""The recipes that come with prunecli, by name."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path

from prunecli.errors import PruneError

_PACKAGED = Path(__file__).parent / "files"
DIRECTORY = _PACKAGED if _PACKAGED.is_dir() else Path(__file__).parents[2] / "recipes"
"""Holds the recipes, and the configurations that they train from random weights: of a wheel or of a checkout."""

FIRST = ("quickstart", "shrink-a-llm", "moe-language-model", "nllb-for-two-languages", "embedding-model")
"""Those for a model of one's own; the others repeat experiments of papers."""


def bundled_recipes() -> Mapping[str, Path]:
    """Name -> file, those of `FIRST` first."""
    found = {path.stem: path for path in sorted(DIRECTORY.glob("*.yaml"))}
    return {name: found[name] for name in sorted(found, key=lambda name: ([*FIRST, name].index(name), name))}


def shown_name(recipe: Path) -> Path:
    """What messages call a recipe: a bundled one by its name."""
    return Path(recipe.stem) if recipe.parent == DIRECTORY else recipe


def find_recipe(given: str) -> Path:
    """The file of this path, else the recipe of this name.

    Raises:
        PruneError: there is neither; it says what there is.
    """
    known, path = bundled_recipes(), Path(given)
    if path.is_file() or (given not in known and path.suffix in (".yaml", ".yml")):
        return path
    if given in known:
        return known[given]
    near = [name for name in known if path.stem and path.stem in name]
    near = near or difflib.get_close_matches(path.stem, known, n=1)
    raise PruneError(
        f"{given}: no such file, and no recipe of this name",
        f"Did you mean {' or '.join(near)}?"
        if near
        else "prunecli run --list names those that come with it.",
    )
