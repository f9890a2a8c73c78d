"""Attention heads in the terminal: layers by heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from prunecli.commands import console

if TYPE_CHECKING:
    from rich.table import Table

    from prunecli.checkpoint.attention import AttentionLayer

WIDTH = 16
"""Heads in a line of the table; layers with more take several."""


def head_table(
    values: Mapping[str, Sequence[float]],
    layers: Sequence[AttentionLayer],
    title: str = "Heads",
    digits: int = 3,
) -> Table:
    """One row for each attention, one column for each head of the original model; pruned heads have no value.

    Args:
        values: attention's name -> a value for each head that it holds.
        layers: the attentions, in the order of the rows; those without values are left out.
        title: above the table.
        digits: significant digits of a value.
    """
    layers = [layer for layer in layers if layer.name in values]
    heads = max((layer.original_heads for layer in layers), default=0)
    columns = ["attention", "layer", *(f"head {n}" if n == 0 else str(n) for n in range(min(heads, WIDTH)))]
    rows = [row for layer in layers for row in _rows(layer, values[layer.name], digits)]
    return console.table(title, columns, rows)


def _rows(layer: AttentionLayer, values: Sequence[float], digits: int) -> list[list[str]]:
    by_head = dict(zip(layer.heads, values, strict=True))
    found = []
    for start in range(0, max(layer.original_heads, 1), WIDTH):
        cells = [
            f"{by_head[head]:.{digits}g}" if head in by_head else "-"
            for head in range(start, min(start + WIDTH, layer.original_heads))
        ]
        label = [layer.kind, str(layer.layer)] if start == 0 else [f"  from head {start}", ""]
        found.append([*label, *cells])
    return found
