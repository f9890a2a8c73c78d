"""`prunecli compare-languages`: which languages use the same experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prunecli.commands import console
from prunecli.commands.options import (
    ForceOption,
    JsonOption,
    LangsOption,
    QuietOption,
    TableOption,
    removed_share,
)
from prunecli.commands.outputs import check_outputs, write_table, written
from prunecli.errors import StatisticsError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from prunecli.analysis.language_experts import Node
    from prunecli.results.languages import ExpertsPerLayer, Languages, Relation

TABLE_PAIRS = 12
"""With more pairs than this, their similarities are summed up in the terminal, not listed."""


def compare_languages(
    gates: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="GATES.json", help="Gate statistics; default: ./gates.json.", show_default=False
        ),
    ] = None,
    ratio: Annotated[
        float,
        typer.Option(
            "--ratio",
            parser=removed_share,
            metavar="R",
            help="Fraction of the experts removed, in [0, 1), such as 0.75 or 75%.",
        ),
    ] = 0.75,
    metric: Annotated[
        str, typer.Option("--metric", help="importance, importance-vanilla, top1, top2, load-balance.")
    ] = "importance",
    strategy: Annotated[
        str,
        typer.Option(
            "--strategy", help="What selects these sets: side-threshold, global-threshold, per-layer."
        ),
    ] = "side-threshold",
    balance: Annotated[
        str,
        typer.Option("--balance", help="Encoder experts to decoder experts in these sets.", metavar="E:D"),
    ] = "1:1",
    min_per_layer: Annotated[
        int, typer.Option("--min-per-layer", min=1, help="Experts that every layer keeps.")
    ] = 4,
    linkage: Annotated[
        str,
        typer.Option("--linkage", help="How clusters of languages join: ward, average, complete, single."),
    ] = "ward",
    langs: LangsOption = None,
    layer_metric: Annotated[
        str | None,
        typer.Option(
            "--layer-metric",
            help="Metric of the experts per layer, such as top1 in the paper's Figure 1; default: that of --metric.",
            show_default=False,
        ),
    ] = None,
    groups: Annotated[
        Path | None,
        typer.Option(
            "--groups",
            help="Experts of each side by group of languages too, such as resource classes: a language, a tab and its "
            "group a line, or {language: group} in .json.",
            metavar="FILE",
            show_default=False,
        ),
    ] = None,
    families: Annotated[
        Path | None,
        typer.Option(
            "--families",
            help="Colours of the trees in --plot and the report: a language, a tab and its family a line, or .json.",
            metavar="FILE",
            show_default=False,
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", help="Also draw it all.", metavar="FILE.png", show_default=False),
    ] = None,
    table: TableOption = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The result.")] = Path("languages.json"),
    force: ForceOption = False,
    quiet: QuietOption = False,
    json: JsonOption = False,
) -> None:
    """Compare languages by the experts that they use.

    Shows how alike the experts are that language pairs with a common source or target select, which languages
    have like importance vectors, and how many experts each layer keeps under a global threshold.
    """
    import numpy as np

    from prunecli.analysis.language_comparison import (
        compare_by_language,
        language_options,
        similarity_matrices,
    )
    from prunecli.results.gates import merge
    from prunecli.results.published import read_gates
    from prunecli.tensors.documents import write_json

    files = gates or [Path("gates.json")]
    if not gates and not files[0].is_file():
        raise StatisticsError(
            "gates.json: no such file", "Name a statistics file, or make it: prunecli collect-gates."
        )
    check_outputs(output, plot, table, force=force)
    options = language_options(
        ratio=ratio,
        metric=metric,
        strategy=strategy,
        balance=balance,
        minimum=min_per_layer,
        linkage=linkage,
        languages=langs,
        layer_metric=layer_metric,
        groups=groups,
        families=families,
    )
    statistics = merge([read_gates(path) for path in files], [str(path) for path in files])
    languages = compare_by_language(statistics, options, [path.name for path in files])
    if plot is not None:
        similarity = languages.similarity
        if similarity is None:
            matrices = None
        elif similarity.encoder is None or similarity.decoder is None:
            matrices = similarity_matrices(statistics, options, languages.pairs)
        else:
            matrices = {"encoder": np.array(similarity.encoder), "decoder": np.array(similarity.decoder)}
        _plot(plot, languages, matrices)
    write_json(output, languages.to_json(), force=force)
    few = len(languages.pairs) <= TABLE_PAIRS
    write_table(table, languages, force=force, leave_out=() if few else ("similarity",))
    if json:
        console.print_json(languages.to_json())
    elif not quiet:
        _show(languages)
        console.note(written(output, plot, table))


def _show(languages: Languages) -> None:
    removed = f"{languages.ratio:.0%} of the experts removed by {languages.metric}"
    similarity = languages.similarity
    if similarity is not None:
        title = f"Jaccard similarity of the selected experts ({removed}, {languages.strategy})"
        console.show(_relations(title, similarity.relations))
        encoder, decoder = similarity.encoder, similarity.decoder
        if len(languages.pairs) <= TABLE_PAIRS and encoder is not None and decoder is not None:
            console.show(_triangles(languages.pairs, encoder, decoder))
        else:
            console.out(f"{len(languages.pairs)} pairs; --langs A,B,C lists those between a few languages.\n")
    clusters = languages.clustering
    for side, tree in (("encoder by source", clusters.encoder), ("decoder by target", clusters.decoder)):
        if tree is not None:
            console.out(f"Clusters of languages, {side} ({clusters.linkage} linkage)")
            console.out("\n".join(_tree(tree.clusters)) + "\n")
    if languages.experts_per_layer is not None:
        removed = f"{languages.ratio:.0%} of the experts removed by {languages.experts_per_layer.metric}"
        console.show(_experts(removed, languages.experts_per_layer))
        if languages.experts_per_layer.by_group:
            console.show(_by_group(languages.experts_per_layer))


def _relations(title: str, by_side: Mapping[str, Mapping[str, Relation | None]]) -> console.Shown:
    """One row for each side and each thing that two pairs can have in common."""
    rows = [
        [side, relation, str(spread.comparisons), f"{spread.mean:.0%}", _range(spread)]
        for side, by_relation in by_side.items()
        for relation, spread in by_relation.items()
        if spread is not None
    ]
    return console.table(title, ["experts of the", "pairs with", "compared", "mean", "range"], rows, 2)


def _range(spread: Relation) -> str:
    return f"{spread.lowest:.0%} to {spread.highest:.0%}"


def _triangles(
    pairs: Sequence[str], encoder: Sequence[Sequence[float]], decoder: Sequence[Sequence[float]]
) -> console.Shown:
    """Table 4: the encoder below the diagonal, the decoder above, where a source or target is shared."""
    columns = ["pair", *(str(number) for number in range(1, len(pairs) + 1))]
    rows = []
    for row, pair in enumerate(pairs):
        cells = [
            _cell(pair, other, (encoder if column < row else decoder)[row][column])
            for column, other in enumerate(pairs)
        ]
        rows.append([f"{row + 1} {pair}", *cells])
    return console.table("The same in %, encoder below the diagonal and decoder above", columns, rows)


def _cell(pair: str, other: str, value: float) -> str:
    shared = any(first == second for first, second in zip(pair.split("-"), other.split("-"), strict=True))
    return f"{100 * value:.0f}" if shared and pair != other else "-" if pair == other else ""


def _tree(clusters: Mapping[str, Any]) -> list[str]:
    """The nested clusters of languages.json as lines of text."""
    from prunecli.analysis.language_experts import Cluster, text_tree

    def node(value: Mapping[str, Any] | str) -> Node:
        if isinstance(value, str):
            return value
        first, second = value["members"]
        return Cluster(value["distance"], (node(first), node(second)))

    return text_tree(node(clusters))


def _experts(removed: str, layers: ExpertsPerLayer) -> console.Shown:
    """Experts per layer, and in each side as a whole."""
    rows = [
        [layer, f"{mean:.1f}", f"{lowest} to {highest}"]
        for layer, mean, lowest, highest in zip(
            layers.layers, layers.mean, layers.lowest, layers.highest, strict=True
        )
    ]
    for side in dict.fromkeys(layers.sides):
        means = [mean for mean, own in zip(layers.mean, layers.sides, strict=True) if own == side]
        rows.append([f"{side}, all layers", f"{sum(means):.1f}", ""])
    title = f"Experts per layer under the global threshold ({removed}), mean over {len(layers.by_pair)} pairs"
    return console.table(title, ["layer", "experts", "range"], rows)


def _by_group(layers: ExpertsPerLayer) -> console.Shown:
    """One row per group of sources and group of targets: experts of each side (Table 16)."""
    rows = [
        [group.source, group.target, str(group.pairs), f"{group.encoder:.1f}", f"{group.decoder:.1f}"]
        for group in layers.by_group
    ]
    columns = ["from", "to", "pairs", "encoder", "decoder"]
    return console.table("The same by group of languages: experts of a side", columns, rows, 2)


def _plot(path: Path, languages: Languages, similarity: Mapping[str, NDArray[np.float64]] | None) -> None:
    import numpy as np

    from prunecli.analysis.language_experts import two_triangles
    from prunecli.analysis.plots import languages_figure, save_figure

    clusters, layers = languages.clustering, languages.experts_per_layer
    trees = {
        "Encoder experts, by source language": clusters.encoder,
        "Decoder experts, by target language": clusters.decoder,
    }
    figure = languages_figure(
        {title: (tree.languages, np.array(tree.matrix)) for title, tree in trees.items() if tree is not None},
        None if layers is None else (layers.layers, layers.mean),
        None
        if similarity is None
        else (languages.pairs, two_triangles(similarity["encoder"], similarity["decoder"])),
        languages.families,
    )
    save_figure(figure, path)
