"""Attention heads in the terminal: layers by heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from prunecli.commands import console
from prunecli.commands.table_layout import GAP

if TYPE_CHECKING:
    from prunecli.model.attention import AttentionLayer

MOST = 16
"""Heads in a line of the table at most, as far as they fit; layers with more take several lines."""


def head_table(
    values: Mapping[str, Sequence[float]],
    layers: Sequence[AttentionLayer],
    title: str = "Heads",
    digits: int = 3,
) -> console.Shown:
    """One row for each attention, one column for each head of the original model; pruned heads have no value.

    Args:
        values: attention's name -> a value for each head that it holds.
        layers: the attentions, in the order of the rows; those without values are left out.
        title: above the table.
        digits: significant digits of a value.
    """
    layers = [layer for layer in layers if layer.name in values]
    cells = {layer.name: _cells(layer, values[layer.name], digits) for layer in layers}
    heads = max(map(len, cells.values()), default=0)
    count = _in_a_line(heads, [text for texts in cells.values() for text in texts])
    columns = ["attention", "layer", *(f"head {n}" if n == 0 else str(n) for n in range(count))]
    rows = [row for layer in layers for row in _rows(layer, cells[layer.name], count)]
    return console.table(title, columns, rows)


def _cells(layer: AttentionLayer, values: Sequence[float], digits: int) -> list[str]:
    """The value of each head of the original model; a dash for those that are gone."""
    by_head = dict(zip(layer.heads, values, strict=True))
    return [f"{by_head[head]:.{digits}g}" if head in by_head else "-" for head in range(layer.original_heads)]


def _in_a_line(heads: int, texts: Sequence[str]) -> int:
    """Heads that fit the width; of more, lines of one length, unless that would be half of what fits."""
    width = max((len(text) for text in texts), default=0)
    labels = len(" attention ") + len("layer") + GAP
    first = max(width, len("head 0")) + GAP
    fit = min(MOST, 1 + max(0, console.width() - labels - first) // (width + GAP))
    if heads <= fit:
        return heads
    return next((count for count in range(fit, fit // 2, -1) if heads % count == 0), fit)


def _rows(layer: AttentionLayer, cells: Sequence[str], count: int) -> list[list[str]]:
    rows = []
    for start in range(0, max(len(cells), 1), count or 1):
        label = [layer.kind, str(layer.layer)] if start == 0 else [f"  from {start}", ""]
        rows.append([*label, *cells[start : start + count]])
    return rows
