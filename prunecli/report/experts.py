"""The section of experts: which of them each layer kept, and how the router used them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prunecli.report.collect import Found, Material
from prunecli.report.grids import Strip, heat_map, scale_key, scale_of, strips
from prunecli.report.markup import Html, counted, element, join

if TYPE_CHECKING:
    from prunecli.results.gates import GateStatistics


def experts_section(material: Material) -> Html | None:
    """A strip per sparse layer of each pruned checkpoint, the traffic of each gates.json; None without either."""
    pruned = [
        one for one in material.checkpoints if one.checkpoint.structure.experts and one.inventory.layers
    ]
    files = material.gates()
    if not pruned and not files:
        return None
    kept = [part for one in pruned for part in _kept(one)]
    note = (
        "Each cell is an expert of the original model: filled where it was kept, pale where it was removed."
    )
    return join([*([element("p", note)] if pruned else []), *kept, *(_traffic(*file) for file in files)])


def _kept(one: Found) -> list[Html]:
    layers = [
        Strip(f"{layer.side} {layer.layer}", layer.experts, layer.original_experts)
        for layer in one.inventory.layers
    ]
    held, original = sum(len(layer.kept) for layer in layers), sum(layer.original for layer in layers)
    caption = f"Experts kept by {one.name}: {held:,} of {original:,}"
    return [element("h3", one.name), strips(caption, layers)]


def _traffic(name: str, statistics: GateStatistics) -> Html:
    """Layers by experts: the share of the tokens that rank an expert first, over all pairs."""
    sums = statistics.combined(statistics.entries)
    grid = [
        [float(count) / float(total) if total else None for count in row]
        for row, total in zip(sums.top1, sums.tokens, strict=True)
    ]
    scale = scale_of([grid])
    said = f"{counted(len(statistics.entries), 'pair')}, collected with {statistics.mode} decoding"
    caption = "Share of a layer's tokens that rank an expert first, over all pairs"
    drawn = heat_map(
        caption, grid, statistics.layers, [str(index) for index in range(statistics.num_experts)], scale
    )
    key = scale_key(scale, "0 %", f"{scale.high:.1%}")
    return join([element("h3", name), element("p", f"{said}."), drawn, key])
