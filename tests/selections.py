"""Selections of given units, by the names of the modules that hold them."""

from collections.abc import Collection, Mapping
from typing import Any

from prunecli.selection.cut import Selection


def kept_experts(kept: Mapping[str, Collection[int]], **more: Any) -> Selection:
    """Kept experts of sparse layers."""
    return Selection({f"{name}.experts": ids for name, ids in kept.items()}, **more)


def kept_heads(kept: Mapping[str, Collection[int]], **more: Any) -> Selection:
    """Kept heads of attentions."""
    return Selection({f"{name}.heads": ids for name, ids in kept.items()}, **more)
