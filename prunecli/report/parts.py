"""The sections of parts: which experts and heads each checkpoint kept, and how much each was used or matters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prunecli.model.attention import KIND_NAMES, kind_and_layer
from prunecli.model.axes import module_of
from prunecli.report.collect import CheckpointEntry, ReportData
from prunecli.report.grids import Strip, heat_map, scale_key, scale_of, strips
from prunecli.report.markup import Html, element, join, maybe, row_of, table
from prunecli.results.gates import GateStatistics
from prunecli.results.similarity import HeadComparison
from prunecli.results.unit_scores import Scores
from prunecli.tensors.quantities import counted

METHODS = {
    "gradient": "importance by gradient (1905.10650, eq. 2)",
    "ablation": "what the score loses without the head",
    "all-but-one": "the score with this head alone in its layer",
}


def experts_section(data: ReportData) -> Html | None:
    """A strip per sparse layer of each pruned checkpoint, the traffic of each gates.json; None without either."""
    pruned = [
        entry
        for entry in data.checkpoints
        if entry.checkpoint.structure.of_kind("expert") and entry.inventory.layers
    ]
    files = data.of(GateStatistics)
    if not pruned and not files:
        return None
    note = (
        "Each cell is an expert of the original model: filled where it was kept, pale where it was removed."
    )
    parts = [element("p", note)] if pruned else []
    for entry in pruned:
        layers = [
            Strip(f"{layer.side} {layer.layer}", layer.experts, layer.original_experts)
            for layer in entry.inventory.layers
        ]
        parts += [
            element("h3", entry.name),
            strips(f"Experts kept by {entry.name}: {_counted(layers)}", layers),
        ]
    return join([*parts, *(_traffic(*file) for file in files)])


def _counted(layers: Iterable[Strip]) -> str:
    kept, original = zip(*((len(layer.kept), layer.original) for layer in layers), strict=True)
    return f"{sum(kept):,} of {sum(original):,}"


def _traffic(name: str, statistics: GateStatistics) -> Html:
    """Layers by experts: the share of the tokens that rank an expert first, over all pairs."""
    sums = statistics.combined(statistics.entries)
    grid = [
        [float(count) / float(total) if total else None for count in row]
        for row, total in zip(sums.top1, sums.tokens, strict=True)
    ]
    scale = scale_of([grid])
    is_text = statistics.mode == "text"
    entry, how = ("text", "") if is_text else ("pair", f", collected with {statistics.mode} decoding")
    said = f"{counted(len(statistics.entries), entry)}{how}"
    caption = f"Share of a layer's tokens that rank an expert first, over all {entry}s"
    experts = list(map(str, range(statistics.num_experts)))
    return join(
        [
            element("h3", name),
            element("p", f"{said}."),
            heat_map(caption, grid, statistics.layers, experts, scale),
            scale_key(scale, "0%", f"{scale.high:.1%}"),
        ]
    )


def heads_section(data: ReportData) -> Html | None:
    """A heat map per heads.json and kind of attention, how two correlate, what each pruned checkpoint kept; or None."""
    files = [(name, scores) for name, scores in data.of(Scores) if scores.kind == "head"]
    comparisons = data.of(HeadComparison)
    pruned = [
        entry
        for entry in data.checkpoints
        if entry.checkpoint.structure.of_kind("head") and entry.inventory.attentions
    ]
    if not files and not comparisons and not pruned:
        return None
    parts = [_scores(name, scores) for name, scores in files]
    parts += [_correlations(name, comparison) for name, comparison in comparisons]
    if pruned:
        parts.append(element("h3", "Heads that are left"))
        parts.append(element("p", "Layers by heads of the original model: filled where a head was kept."))
        parts += [_kept_heads(entry) for entry in pruned]
    return join(parts)


def _scores(name: str, scores: Scores) -> Html:
    drawn = scores.means() if scores.method == "all-but-one" else scores.importance()
    values = {
        module_of(name): dict(zip(scores.ids[name], own.tolist(), strict=True)) for name, own in drawn.items()
    }
    grouped: dict[str, list[tuple[int, str]]] = {}
    for attention in values:
        kind, layer = kind_and_layer(scores.model_type, attention)
        grouped.setdefault(kind, []).append((layer, attention))
    grids = {
        kind: [_row(values[attention]) for _, attention in sorted(layers)]
        for kind, layers in grouped.items()
        if any(values[attention] for _, attention in layers)
    }
    scale = scale_of(list(grids.values()))
    maps = []
    for kind, grid in grids.items():
        rows = [str(layer) if kind in KIND_NAMES else attention for layer, attention in sorted(grouped[kind])]
        columns = [str(head) for head in range(max(map(len, grid)))]
        title = KIND_NAMES.get(kind, kind)
        maps.append(heat_map(title, grid, rows, columns, scale, told=("layer ", "head ")))
    per = " per token" if scores.per == "token" else ""
    said = f"{METHODS[scores.method]}{per}; {scores.task}, {counted(scores.examples, 'example')}"
    if scores.metric is not None and scores.base is not None:
        said += f"; {scores.metric}, {scores.base:.4g} with all heads"
    about = f"{said[0].upper()}{said[1:]}. Layers from top to bottom, heads from left to right."
    key = scale_key(scale, f"{scale.low:.3g}", f"{scale.high:.3g}")
    return join([element("h3", name), element("p", about), row_of(*maps), key])


def _correlations(name: str, comparison: HeadComparison) -> Html:
    caption = (
        f"Correlation of the importance of heads in {comparison.first.file} and {comparison.second.file}"
    )
    columns = {
        "attention": lambda row: KIND_NAMES.get(row.of, row.of),
        "heads": lambda row: f"{row.heads:,}",
        "Pearson r": lambda row: maybe("{:.3f}".format, row.pearson),
        "p": lambda row: maybe("{:.2g}".format, row.pearson_p),
        "Spearman r": lambda row: maybe("{:.3f}".format, row.spearman),
        "p of its rank": lambda row: maybe("{:.2g}".format, row.spearman_p),
    }
    return join([element("h3", name), table(caption, comparison.correlations, columns)])


def _row(values: Mapping[int, float]) -> list[float | None]:
    return [values.get(head) for head in range(max(values) + 1)] if values else []


def _kept_heads(entry: CheckpointEntry) -> Html:
    drawn = []
    for kind in dict.fromkeys(layer.kind for layer in entry.inventory.attentions):
        own = [layer for layer in entry.inventory.attentions if layer.kind == kind]
        layers = [Strip(str(layer.layer), layer.heads, layer.original_heads) for layer in own]
        if any(layer.original for layer in layers):
            drawn.append(strips(f"{KIND_NAMES[kind]}: {_counted(layers)} heads", layers, counts=False))
    return join([element("h4", entry.name), row_of(*drawn)])
