"""Inputs and outputs of layers: a tensor, or tensors in tuples, lists and dictionaries (torch's pytrees)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from prunecli.private import pytree

Kind = type | tuple[type, ...]


def map_tree(tree: Any, function: Callable[[Any], Any], kind: Kind) -> Any:
    """Return the tree with `function` applied to every `kind` in it."""
    return pytree().tree_map_only(kind, function, tree)


def leaves(tree: Any, kind: Kind) -> list[Any]:
    """Every `kind` in the tree, in order."""
    return [leaf for leaf in pytree().tree_leaves(tree) if isinstance(leaf, kind)]


def outline(tree: Any, kind: Kind) -> Any:
    """Return the structure of a tree as JSON: every leaf that is no `kind` in it, and the place of each `kind`."""
    found, spec = pytree().tree_flatten(tree)
    others = [None if isinstance(leaf, kind) else {"value": leaf} for leaf in found]
    return {"spec": pytree().treespec_dumps(spec), "leaves": others}


def rebuilt(shape: Any, parts: Iterator[Any]) -> Any:
    """Return the tree that `outline` made `shape` of, with the next of `parts` in each place."""
    found = [next(parts) if other is None else other["value"] for other in shape["leaves"]]
    return pytree().tree_unflatten(found, pytree().treespec_loads(shape["spec"]))
