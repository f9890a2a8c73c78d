"""Inputs and outputs of layers: a tensor, or tensors in tuples, lists and dictionaries (torch's pytrees)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from prunecli.private import pytree

Kind = type | tuple[type, ...]


def map_tree(tree: Any, function: Callable[[Any], Any], kind: Kind) -> Any:
    """The same tree with `function` of every `kind` in it."""
    return pytree().tree_map_only(kind, function, tree)


def leaves(tree: Any, kind: Kind) -> list[Any]:
    """Every `kind` in the tree, in order."""
    return [leaf for leaf in pytree().tree_leaves(tree) if isinstance(leaf, kind)]


def outline(tree: Any, kind: Kind) -> Any:
    """The tree as JSON, every `kind` in it as {"leaf": true}."""
    if isinstance(tree, kind):
        return {"leaf": True}
    if isinstance(tree, (tuple, list)):
        return {type(tree).__name__: [outline(part, kind) for part in tree]}
    if isinstance(tree, dict):
        return {"dict": [[key, outline(part, kind)] for key, part in tree.items()]}
    return {"value": tree}


def rebuilt(shape: Any, parts: Iterator[Any]) -> Any:
    """The tree that `outline` made `shape` of, with the next of `parts` for each leaf."""
    ((name, content),) = shape.items()
    if name == "leaf":
        return next(parts)
    if name == "dict":
        return {key: rebuilt(part, parts) for key, part in content}
    if name == "value":
        return content
    return {"tuple": tuple, "list": list}[name](rebuilt(part, parts) for part in content)
